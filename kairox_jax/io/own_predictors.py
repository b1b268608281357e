"""Predictors that a checkpoint carries itself, as PowerInfer's files do."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kairox_jax.config import ModelConfig
from kairox_jax.io.predictors import LayerPredictor, Predictors
from kairox_jax.quant import PackedRows


class PredictorSource(Protocol):
    """A checkpoint that may bring PowerInfer predictors."""

    @property
    def config(self) -> ModelConfig:
        """The model's facts."""
        ...

    def has(self, name: str) -> bool:
        """Say whether the checkpoint holds a weight."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """Return a fresh float32 array."""
        ...

    def packed(self, name: str) -> PackedRows | None:
        """Return a matrix in the file's own rows, or None."""
        ...


def checkpoint_predictors(source: PredictorSource) -> Predictors | None:
    """Return the predictors that a checkpoint carries itself (PowerInfer's), or None where it has none.

    Read are ``layers.{l}.pred_fc1`` [R, D] and ``layers.{l}.pred_fc2`` [F, R], and the checkpoint's
    ``sparse_threshold`` (0 where it names none) for every layer. x is un-normalised: the residual stream after
    the layer's own attention, in parallel blocks (Falcon) the layer's input.

    Raises:
        ValueError: some layers have predictors and others do not, or their shapes do not fit the model.

    Source: PowerInfer's llama.cpp, `llm_build_ffn_sparse` and its callers.
    """
    config = source.config
    present = [source.has(f"layers.{layer}.pred_fc1") for layer in range(config.num_layers)]
    if not any(present):
        return None
    if not all(present):
        raise ValueError(f"layer {present.index(False)} has no predictor, others have: fetch the file again")
    threshold = float(getattr(source, "sparse_threshold", None) or 0.0)

    def rows(name: str) -> PackedRows:
        packed = source.packed(name)
        return PackedRows(data=source.tensor(name).view(np.uint8), format="f32") if packed is None else packed

    layers = []
    for layer in range(config.num_layers):
        fc1, fc2 = rows(f"layers.{layer}.pred_fc1"), rows(f"layers.{layer}.pred_fc2")
        if (fc1.shape[1], fc2.shape[0]) != (config.d_model, config.num_neurons):
            raise ValueError(
                f"the predictor of layer {layer} reads {fc1.shape[1]} and scores {fc2.shape[0]}; this model "
                f"has width {config.d_model} and {config.num_neurons} neurons: the file does not fit itself"
            )
        layers.append(LayerPredictor(fc1=fc1, fc2=fc2, threshold=threshold))
    input = "layer_input" if config.parallel_block else "own"
    return Predictors(layers=tuple(layers), input=input, meta={"model": "the checkpoint itself"})
