"""Shapes of real models, for tests, compile checks and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """FFN sizes of a model: ``d`` model width, ``f`` neurons a layer."""

    name: str
    d: int
    f: int


SMOLLM2_135M = ModelShape(name="smollm2-135m", d=576, f=1536)
LLAMA_7B = ModelShape(name="llama-7b", d=4096, f=11008)
LLAMA_13B = ModelShape(name="llama-13b", d=5120, f=13824)
LLAMA_70B = ModelShape(name="llama-70b", d=8192, f=28672)
MODEL_SHAPES = (SMOLLM2_135M, LLAMA_7B, LLAMA_13B, LLAMA_70B)
