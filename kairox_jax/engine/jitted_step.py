"""One layer of a hybrid decode step as one program: front, residents, the host's part by a callback, merge.

On CUDA the residents run on a second stream, so that the callback's wait does not hold them up; XLA's CPU backend
runs independent parts beside each other by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Bool, Float, UInt8

from kairox_jax.host.callback import HostFfn
from kairox_jax.models import KVCache

RESIDENT_STREAM = "gpu_stream:1"


class LayerResult(NamedTuple):
    """What a layer's program gives.

    Attributes:
        x: residual stream after the layer.
        cache: the layer's cache, donated.
        hits: slots whose neurons were active, or None where none was valid.
        fired: which of the host's neurons were active.
    """

    x: Float[Array, "B D"]
    cache: KVCache
    hits: Bool[Array, "B C"] | None
    fired: UInt8[Array, "B K"]


def layer_program(
    front: Callable[..., tuple[Any, Any, Any]],
    resident: Callable[..., tuple[Any, Any]],
    host: HostFfn,
    *,
    platform: str,
) -> Callable[..., LayerResult]:
    """Compile ``(weights, x [B,D], start [B], cache, residents, ids [K], n [], layer [], attend) -> LayerResult``.

    Args:
        front: ``programs.front_program``: merges, attends, normalises.
        resident: ``programs.resident_program``.
        host: ``host.callback.host_ffn`` of a backend that runs inside a jit.
        platform: where the program runs.

    Returns:
        The program. ``weights`` are the front's leaves and norm; ``residents`` the resident program's arguments
        before h, or None where no slot is valid; the first n of ``ids`` are evaluated on the host.
    """
    aside = compute_on(RESIDENT_STREAM) if platform in ("cuda", "gpu") else contextlib.nullcontext()

    def run(
        weights: tuple[Any, Any],
        x: Array,
        start: Array,
        cache: KVCache,
        residents: tuple[Any, ...] | None,
        ids: Array,
        n: Array,
        layer: Array,
        attend: int,
    ) -> LayerResult:
        leaves, norm = weights
        nothing = jax.numpy.zeros_like(x)
        x, h, cache = front(leaves, norm, x, nothing, nothing, start, cache, attend)
        y_device, hits = nothing, None
        if residents is not None:
            with aside:
                y_device, hits = resident(*residents, h)
        y_host, fired = host(h, ids, n, layer)
        return LayerResult(x + y_device + y_host, cache, hits, fired)

    return jax.jit(run, static_argnames="attend", donate_argnames="cache")
