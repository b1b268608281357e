"""The activation profile of a model: what `kairox profile` measures, in one .npz file.

Its first form held only ``frequency``; every other field is optional, so old files are read as they are.
"""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, UInt8

REMEDY = "make it again with `kairox profile`"
# Kept in float16: shares, of which three digits count.
_HALVES = ("frequency", "reactivation", "together")


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """What one model did over some text.

    Attributes:
        frequency: share of the tokens at which each neuron is active, in 0..1 [L, F].
        active_frac: share of the neurons active per token, mean and standard deviation over tokens [L, 2].
        cosine: ``cosine[l, d - 1]`` is the mean cosine between the residual stream after attention of layer l
            and of layer l + d, d = 1, 2; NaN where there is no such layer [L, 2].
        reactivation: ``reactivation[l, d - 1]`` is P(active at t + d | active at t) over all neurons and tokens
            of a window; NaN for distances that no window has [L, distances].
        partners: the neurons that are most often active together with each neuron, best first [L, F, K].
        together: share of the sampled tokens at which both are active [L, F, K].
        sample: active sets of tokens drawn evenly from the text, packed to bits [R, L, ceil(F / 8)].
        meta: model, fingerprint, num_layers, num_neurons, activation, thresholds, tokens, files, command.
    """

    frequency: Float32[np.ndarray, "L F"]
    active_frac: Float32[np.ndarray, "L 2"] | None = None
    cosine: Float32[np.ndarray, "L 2"] | None = None
    reactivation: Float32[np.ndarray, "L distances"] | None = None
    partners: Int32[np.ndarray, "L F K"] | None = None
    together: Float32[np.ndarray, "L F K"] | None = None
    sample: UInt8[np.ndarray, "R L bytes"] | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        frequency = np.asarray(self.frequency, np.float32)
        object.__setattr__(self, "frequency", frequency)
        if frequency.ndim != 2 or not frequency.size:
            raise ValueError(f"frequency has shape {frequency.shape}, not layers by neurons: {REMEDY}")
        if not ((frequency >= 0) & (frequency <= 1)).all():  # also false for NaN
            raise ValueError(f"the profile holds shares outside 0 to 1, or NaN: {REMEDY}")
        (layers, neurons), like = frequency.shape, {}
        like |= {"active_frac": (layers, 2), "cosine": (layers, 2), "reactivation": (layers, None)}
        like |= {name: (layers, neurons, None) for name in ("partners", "together")}
        like["sample"] = (None, layers, (neurons + 7) // 8)
        for name, want in like.items():
            _check_shape(name, getattr(self, name), want)
        if (self.partners is None) != (self.together is None):
            raise ValueError(f"the profile has only one of partners and together: {REMEDY}")
        if self.partners is not None and self.together is not None:
            if self.partners.shape != self.together.shape:
                raise ValueError(f"partners {self.partners.shape} and together differ in shape: {REMEDY}")
            if self.partners.size and not 0 <= self.partners.min() <= self.partners.max() < neurons:
                raise ValueError(f"the profile names partners outside 0..{neurons - 1}: {REMEDY}")

    @property
    def num_layers(self) -> int:
        """L."""
        return self.frequency.shape[0]

    @property
    def num_neurons(self) -> int:
        """F."""
        return self.frequency.shape[1]


def save_profile(path: str | Path, profile: Profile) -> None:
    """Write a profile.

    Raises:
        ValueError: ``meta`` lacks the model's fingerprint.
    """
    if "fingerprint" not in profile.meta:
        raise ValueError(
            "the profile's meta lacks 'fingerprint': a reader could not tell which model it fits"
        )
    arrays: dict[str, Any] = {"meta": np.array(json.dumps(profile.meta))}
    for name in _array_names():
        value = getattr(profile, name)
        if value is not None:
            arrays[name] = value.astype(np.float16) if name in _HALVES else value
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def load_profile(path: str | Path) -> Profile:
    """Read a profile, of this form or of the first, which holds frequencies alone.

    Raises:
        ValueError: unreadable, no profile, or with fields that do not fit each other.
    """
    try:
        # From memory: np.load leaves the file open when it is no zip.
        with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
            found = {name: file[name] for name in (*_array_names(), "meta") if name in file.files}
            frequency = found.pop("frequency")
        meta = json.loads(str(found.pop("meta", "{}")))
        if not isinstance(meta, dict):
            raise ValueError
        arrays = {name: _widened(value) for name, value in found.items()}
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; {REMEDY}") from None
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no activation profile: {REMEDY}") from None
    try:
        return Profile(frequency=frequency, meta=meta, **arrays)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_fingerprint(meta: dict[str, Any], wanted: str, what: str) -> None:
    """Check that a file was made for the model with this fingerprint.

    Raises:
        ValueError: it names none, or another.
    """
    if meta.get("fingerprint") != wanted:
        made_for = meta.get("model", "another model")
        raise ValueError(f"{what} was made for {made_for}, not for this model: {REMEDY}")


def _array_names() -> list[str]:
    return [item.name for item in fields(Profile) if item.name != "meta"]


def _widened(value: np.ndarray) -> np.ndarray:
    if value.dtype.kind == "f":
        return value.astype(np.float32)
    return value if value.dtype == np.uint8 else value.astype(np.int32)


def _check_shape(name: str, value: np.ndarray | None, want: tuple[int | None, ...]) -> None:
    if value is None:
        return
    same = value.ndim == len(want)
    if not same or any(w is not None and w != g for w, g in zip(want, value.shape, strict=True)):
        asked = "[" + ", ".join("any" if w is None else str(w) for w in want) + "]"
        raise ValueError(f"{name} has shape {list(value.shape)}, expected {asked}: {REMEDY}")
