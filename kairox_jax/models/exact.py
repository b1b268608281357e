"""The modes, and what makes neurons inactive in ``exact`` mode: an activation's zeros, or thresholds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from kairox_jax.config import MODES, ModelConfig
from kairox_jax.io import (
    Checkpoint,
    Predictors,
    Sparsity,
    check_predictors,
    checkpoint_predictors,
    load_predictors,
    load_sparsity,
    shipped_predictors,
    shipped_sparsity,
)
from kairox_jax.io.sparsity import check_model

# The rules that a threshold changes: calibrated for SiLU, a fact of the checkpoint for FATReLU.
THRESHOLDED = ("silu", "fatrelu")


def check_mode(mode: str) -> None:
    """Raise ``ValueError`` for a mode that does not exist."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown: choose one of {', '.join(MODES)}")


def find_predictors(checkpoint: Checkpoint, folder: str | Path | None) -> Predictors:
    """Return the predictors of a folder; without one the checkpoint's own, or the shipped ones.

    Raises:
        ValueError: there are none, or they are broken or were made for another model.
    """
    if folder is not None:
        predictors = load_predictors(folder)
        check_predictors(predictors, checkpoint)
        return predictors
    found = checkpoint_predictors(checkpoint) or shipped_predictors(checkpoint)
    if found is None:
        raise ValueError(
            "no predictors are known for this model: make them with `kairox train-predictors` and give them as "
            "--predictors FOLDER, or use --mode exact, which needs none"
        )
    return found


def predicted_thresholds(config: ModelConfig, sparsity: Sparsity | None) -> Float[np.ndarray, " L"]:
    """Return thresholds under which every predicted neuron of a SiLU model counts; others keep their zeros."""
    if config.activation == "silu":
        return np.full(config.num_layers, -1.0, np.float32)
    return resolve_thresholds(config, sparsity)


def find_sparsity(checkpoint: Checkpoint, folder: str | Path | None) -> Sparsity | None:
    """Return thresholds and profile from a folder; without one the checkpoint's own, or the shipped ones, if any.

    Raises:
        ValueError: the folder is broken, or was made for another model.
    """
    own = checkpoint.own_sparsity() if folder is None else None
    if folder is None and own is None:
        return shipped_sparsity(checkpoint)
    sparsity = load_sparsity(folder) if folder is not None else own
    assert sparsity is not None
    check_model(sparsity, checkpoint)
    return sparsity


def gate_thresholded(checkpoint: Checkpoint, sparsity: Sparsity | None) -> Checkpoint:
    """Return the checkpoint as a FATReLU model where its sparsity holds thresholds on the gate.

    Raises:
        ValueError: such thresholds for an activation that FATReLU does not replace.
    """
    if sparsity is None or sparsity.meta.get("rule") != "fatrelu":
        return checkpoint
    if checkpoint.config.activation not in ("relu", "fatrelu"):
        raise ValueError(
            f"the thresholds are FATReLU's, this model's activation is {checkpoint.config.activation}: make "
            "thresholds for it with `kairox sparsify`"
        )
    return replace(checkpoint, config=replace(checkpoint.config, activation="fatrelu"))


def resolve_thresholds(config: ModelConfig, sparsity: Sparsity | None) -> Float[np.ndarray, " L"]:
    """Return each layer's activation threshold for ``exact`` mode: float32 [L].

    A SiLU model takes those of ``sparsity``, a FATReLU model too where they are thresholds on the gate (see
    ``gate_thresholded``); the others their config's (zero for all but FATReLU).

    Raises:
        ValueError: a SiLU model without thresholds (none of its neurons is ever exactly zero), or with those
            of another number of layers.
    """
    on_gate = (
        config.activation == "fatrelu" and sparsity is not None and sparsity.meta.get("rule") == "fatrelu"
    )
    if config.activation != "silu" and not on_gate:
        return np.full(config.num_layers, config.activation_threshold, np.float32)
    if sparsity is None:
        raise ValueError(
            "this model's activation is SiLU, which is never zero, and no thresholds are known for it: "
            "use mode 'dense' (--mode dense), or make thresholds with `kairox sparsify MODEL --out FOLDER` and give "
            "their folder as sparsity (--sparsity FOLDER)"
        )
    thresholds = np.asarray(sparsity.thresholds, np.float32)
    if thresholds.shape != (config.num_layers,):
        raise ValueError(
            f"{thresholds.shape[0]} thresholds for {config.num_layers} layers: they belong to another model"
        )
    return thresholds
