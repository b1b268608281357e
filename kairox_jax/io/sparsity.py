"""A model's sparsity: one activation threshold a layer and how often each neuron is active.

Owns the two files of a sparsity folder (``thresholds.json``, ``profile.npz``) and finds the folder that is
shipped for a model. ``kairox sparsify`` makes them, ``kairox profile`` the second with more in it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float

from kairox_jax.config import ModelConfig
from kairox_jax.io.profile import load_profile

FORMAT = 1
SHIPPED = Path(__file__).parents[2] / "checkpoints"
REMEDY = "make it again with `kairox sparsify`"
_SIZES = ("num_layers", "d_model", "num_neurons", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
_REQUIRED = ("format", "fingerprint", "num_layers", "num_neurons", "thresholds")


class TensorSource(Protocol):
    """What is needed of a checkpoint: facts, and float32 tensors by canonical name."""

    @property
    def config(self) -> ModelConfig:
        """The model's facts."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """Return a fresh float32 array."""
        ...


@dataclass(frozen=True, eq=False)
class Sparsity:
    """Thresholds and profile of one model.

    Attributes:
        thresholds: float32 [L]; a neuron of layer l is active where its value exceeds ``thresholds[l]``.
        frequency: float32 [L, F], share of the calibration tokens at which the neuron is active; None where
            no profile was written.
        meta: facts for people and checks: model, fingerprint, num_neurons, losses, texts, command, versions.
    """

    thresholds: Float[np.ndarray, " L"]
    frequency: Float[np.ndarray, "L F"] | None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        thresholds = np.asarray(self.thresholds, np.float32)
        object.__setattr__(self, "thresholds", thresholds)
        if thresholds.ndim != 1 or not thresholds.size:
            raise ValueError(f"thresholds have shape {thresholds.shape}: give one number a layer")
        if not np.isfinite(thresholds).all() or (thresholds < 0).any():
            layer = int(np.argmin(np.isfinite(thresholds) & (thresholds >= 0)))
            raise ValueError(
                f"threshold {thresholds[layer]} of layer {layer} must be finite and not negative: {REMEDY}"
            )
        if self.frequency is None:
            return
        frequency = np.asarray(self.frequency, np.float32)
        object.__setattr__(self, "frequency", frequency)
        if frequency.ndim != 2 or len(frequency) != len(thresholds):
            raise ValueError(
                f"the profile has shape {frequency.shape}, not {len(thresholds)} layers by neurons: {REMEDY}"
            )
        if not ((frequency >= 0) & (frequency <= 1)).all():  # also false for NaN
            raise ValueError(f"the profile holds shares outside 0 to 1, or NaN: {REMEDY}")


def fingerprint(source: TensorSource) -> str:
    """Return the identity of a model, the same for every quantisation of it.

    It is a SHA-256 over the sizes and the norms' scales, which no common block format quantises.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps({name: getattr(source.config, name) for name in _SIZES}).encode())
    layers = range(source.config.num_layers)
    names = [f"layers.{layer}.{norm}" for layer in layers for norm in ("attn_norm", "ffn_norm")]
    for name in [*names, "out_norm"]:
        digest.update(np.ascontiguousarray(source.tensor(name), "<f4").tobytes())
    return digest.hexdigest()


def check_model(sparsity: Sparsity, source: TensorSource) -> None:
    """Check that a sparsity was made for this model.

    Raises:
        ValueError: another number of layers or neurons, another activation, or another fingerprint.
    """
    config, made_for = source.config, sparsity.meta.get("model", "another model")
    want = (config.num_layers, config.num_neurons)
    got = (len(sparsity.thresholds), sparsity.meta.get("num_neurons"))
    if got != want:
        raise ValueError(
            f"the sparsity of {made_for} has {got[0]} layers of {got[1]} neurons, this model {want[0]} of "
            f"{want[1]}: {REMEDY}"
        )
    made_with = sparsity.meta.get("activation", config.activation)
    if made_with != config.activation:  # the same model before or after its activation was replaced
        raise ValueError(
            f"the sparsity of {made_for} was made with activation {made_with}, this model has {config.activation}: "
            f"{REMEDY}"
        )
    if sparsity.meta.get("fingerprint") != fingerprint(source):
        raise ValueError(f"the sparsity was made for {made_for}, not for this model: {REMEDY}")


def save_sparsity(folder: str | Path, sparsity: Sparsity) -> None:
    """Write ``thresholds.json`` and, where there is a profile, ``profile.npz`` (float16) into a folder.

    Raises:
        ValueError: ``meta`` lacks the fingerprint or the number of neurons, or contradicts the profile.
    """
    meta = {"num_layers": len(sparsity.thresholds), **sparsity.meta}
    for key in ("fingerprint", "num_neurons"):
        if key not in meta:
            raise ValueError(
                f"the sparsity's meta lacks {key!r}: a reader could not tell which model it fits"
            )
    frequency = sparsity.frequency
    _check_sizes(sparsity.thresholds, frequency, meta, str(folder))
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    thresholds = [float(str(value)) for value in sparsity.thresholds]  # the shortest digits that give it back
    text = json.dumps({"format": FORMAT, **meta, "thresholds": thresholds}, indent=2, ensure_ascii=False)
    (path / "thresholds.json").write_text(text + "\n", encoding="utf-8")
    if frequency is None:
        (path / "profile.npz").unlink(missing_ok=True)
    else:
        np.savez_compressed(path / "profile.npz", frequency=frequency.astype(np.float16))


def load_sparsity(folder: str | Path) -> Sparsity:
    """Read a sparsity folder, or a profile file, which carries the thresholds that it was made with.

    Raises:
        ValueError: a file is missing, damaged, of an unknown format, of another model than the file beside it,
            or the sizes do not agree.
    """
    path = Path(folder)
    if path.is_file():
        return _from_profile(path)
    if not (path / "thresholds.json").exists() and (path / "profile.npz").exists():
        return _from_profile(path / "profile.npz")
    meta = _read_json(path / "thresholds.json")
    missing = [key for key in _REQUIRED if key not in meta]
    if missing:
        raise ValueError(f"{path / 'thresholds.json'} lacks {', '.join(missing)}: {REMEDY}")
    if meta.pop("format") != FORMAT:
        raise ValueError(f"{path / 'thresholds.json'} is not of format {FORMAT}: {REMEDY}")
    thresholds = _as_thresholds(meta.pop("thresholds"), path / "thresholds.json")
    frequency = None
    if (path / "profile.npz").exists():
        profile = load_profile(path / "profile.npz")
        if profile.meta.get("fingerprint", meta["fingerprint"]) != meta["fingerprint"]:
            raise ValueError(
                f"{path / 'profile.npz'} was made for {profile.meta.get('model')}, thresholds.json beside it for "
                f"{meta.get('model')}: take the profile out, or make it again with `kairox profile`"
            )
        frequency = profile.frequency
    sparsity = Sparsity(thresholds, frequency, meta)
    _check_sizes(sparsity.thresholds, sparsity.frequency, meta, str(path))
    return sparsity


def _from_profile(path: Path) -> Sparsity:
    """Read a profile as thresholds and frequencies."""
    profile = load_profile(path)
    meta = dict(profile.meta)
    missing = [key for key in ("fingerprint", "thresholds") if key not in meta]
    if missing:
        raise ValueError(
            f"{path} alone does not say {', '.join(missing)}: put thresholds.json beside it (`kairox sparsify`)"
        )
    thresholds = _as_thresholds(meta.pop("thresholds"), path)
    meta |= {"num_layers": profile.num_layers, "num_neurons": profile.num_neurons}
    _check_sizes(thresholds, profile.frequency, meta, str(path))
    return Sparsity(thresholds, profile.frequency, meta)


def _as_thresholds(values: Any, path: Path) -> Float[np.ndarray, " L"]:
    try:
        return np.asarray(values, np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"thresholds in {path} are no list of numbers: {REMEDY}") from None


def shipped_folder(source: TensorSource, folder: str | Path = SHIPPED) -> Path | None:
    """Return the sparsity folder shipped for a model, or None where none is.

    Args:
        source: an open checkpoint.
        folder: holds one sparsity folder a model.
    """
    files = sorted(Path(folder).glob("*/thresholds.json"))
    wanted = fingerprint(source) if files else ""
    for file in files:
        meta = _read_json(file)
        same_activation = meta.get("activation", source.config.activation) == source.config.activation
        if meta.get("fingerprint") == wanted and same_activation:
            return file.parent
    return None


def shipped_sparsity(source: TensorSource, folder: str | Path = SHIPPED) -> Sparsity | None:
    """Return the sparsity shipped for a model, or None where none is.

    Args:
        source: an open checkpoint.
        folder: holds one sparsity folder a model.
    """
    own = shipped_folder(source, folder)
    if own is None:
        return None
    sparsity = load_sparsity(own)
    check_model(sparsity, source)
    return sparsity


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; {REMEDY}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): {REMEDY}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: {REMEDY}")
    return content


def _check_sizes(
    thresholds: np.ndarray, frequency: np.ndarray | None, meta: dict[str, Any], where: str
) -> None:
    layers, neurons = meta["num_layers"], meta["num_neurons"]
    if len(thresholds) != layers:
        raise ValueError(f"{where} has {len(thresholds)} thresholds for {layers} layers: {REMEDY}")
    if frequency is not None and frequency.shape != (layers, neurons):
        raise ValueError(
            f"{where} has a profile of shape {frequency.shape}, not {(layers, neurons)}: {REMEDY}"
        )
