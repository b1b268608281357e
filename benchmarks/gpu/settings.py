"""How large the measurements are: "full" and "quick" for a GPU, "tiny" to run every part on a CPU in tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

from kairox_jax.balancing import POLICIES
from pallas_kernels.shapes import LLAMA_7B, LLAMA_13B, LLAMA_70B, ModelShape


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of all parts.

    Attributes:
        case_limit: cases of each operation whose numerics are checked.
        dtypes: formats of the numerics (with their shared-scale columns) and, all but the first, of the bandwidths.
        shapes: models whose FFN widths are measured.
        active_fracs: shares of the neurons that are listed.
        lists: different lists that take turns, so that caches do not hold the rows.
        repeats: samples of each time; the median counts.
        copy_bytes: size of the array whose copy gives the machine's bandwidth.
        link_bytes: sizes of transfers.
        work_us: host work behind a callback.
        callback_shape: (neurons, width) of the callback's layer.
        commit_records: records of one promotion.
        model: (layers, width, neurons, heads, vocabulary) of the synthetic model, layers for the first try.
        more_layers: layers of the second try, where host memory allows.
        budgets: VRAM budgets in bytes.
        policies: placement policies that decode.
        tokens: decoded tokens of each measurement.
    """

    case_limit: int = 100
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "q8_0", "q4_0", "q4_1")
    shapes: tuple[ModelShape, ...] = (LLAMA_7B, LLAMA_13B, LLAMA_70B)
    active_fracs: tuple[float, ...] = (0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
    lists: int = 16
    repeats: int = 7
    copy_bytes: int = 1 << 30
    link_bytes: tuple[int, ...] = tuple(4**k << 10 for k in range(3, 9))  # 64 KiB to 64 MiB
    work_us: tuple[int, ...] = (0, 50, 200)
    callback_shape: tuple[int, int] = (11008, 1024)
    commit_records: tuple[int, ...] = (8, 32, 64, 256)
    model: tuple[int, int, int, int, int] = (4, 4096, 11008, 32, 32000)
    more_layers: int = 32
    budgets: tuple[int, ...] = (6 * 10**9, 12 * 10**9, 24 * 10**9)
    policies: tuple[str, ...] = tuple(sorted(set(POLICIES) - {"oracle"}))
    tokens: int = 48


FULL = Settings()
SIZES = {
    "full": FULL,
    "quick": replace(
        FULL, case_limit=6, shapes=(LLAMA_7B,), active_fracs=(0.05, 0.15, 1.0), repeats=3, more_layers=8,
        dtypes=("float32", "bfloat16", "q8_0", "q4_1"), policies=("guide", "split", "static"), tokens=16,
        budgets=(6 * 10**9, 12 * 10**9),
    ),
    "tiny": Settings(
        case_limit=2, dtypes=("float32", "q8_0"), shapes=(ModelShape(name="tiny", d=64, f=96),),
        active_fracs=(0.25, 1.0), lists=2, repeats=2, copy_bytes=1 << 16, link_bytes=(1 << 12, 1 << 14),
        work_us=(0, 50), callback_shape=(128, 64), commit_records=(4,), model=(2, 64, 96, 2, 128),
        more_layers=2, budgets=(3 * 10**6,), policies=("guide", "static"), tokens=4,
    ),
}  # fmt: skip


class TimeBox:
    """Tells a part when its time is over.

    Args:
        seconds: what it may take.
    """

    def __init__(self, seconds: float) -> None:
        self._end = perf_counter() + seconds

    @property
    def over(self) -> bool:
        """Whether nothing new should begin."""
        return perf_counter() > self._end

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self._end - perf_counter())
