"""Bytes of a model's parts: those of the arrays that the engine keeps, though no weight is read for the estimate."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import GREEDY, MODELS, TINY, tiny_engine

from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.host_prefill import MOST_TOKENS
from kairox_jax.engine.needs import dense_weight_count, host_dense_bytes
from kairox_jax.host import calls
from kairox_jax.io import Checkpoint, open_checkpoint
from kairox_jax.io.convert import Conversion, convert
from kairox_jax.quant import PackedRows

FFN = ("w_gate", "w_up", "w_down", "b_up")


class MixedFormats:
    """A checkpoint whose k matrices come in float32 only."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def packed(self, name: str) -> PackedRows | None:
        return None if name.endswith("wk") else self.checkpoint.packed(name)

    def packed_format(self, name: str) -> str | None:
        return None if name.endswith("wk") else self.checkpoint.packed_format(name)


def kept_bytes(dense: HostDense) -> int:
    """Return the bytes of every weight that the host's dense part holds."""
    parts: list[Any] = [getattr(layer, f.name) for layer in dense.weights for f in fields(layer)]
    parts += [dense.embedding, dense.pos_embed, dense.out_norm.scale, dense.out_norm.bias]
    parts += [] if dense.output is dense.embedding else [dense.output]
    parts += dense.down_biases or []
    arrays = [part.data if isinstance(part, PackedRows) else part for part in parts]
    return sum(np.asarray(array).nbytes for array in arrays if array is not None)


@pytest.mark.parametrize("name", ["relu-llama", "opt", "falcon-one-norm", "sparse-qwen2"])
def test_the_dense_weights_are_counted(name: str) -> None:
    checkpoint = open_checkpoint(MODELS / name)
    count = sum(checkpoint.tensor(n).size for n in checkpoint.names() if not n.endswith(FFN))
    assert dense_weight_count(checkpoint.config) == count


@pytest.mark.parametrize(
    "name", ["relu-llama", "opt", "opt-untied", "falcon-one-kv", "llama-old-keys", "mistral-window"]
)
def test_the_hosts_dense_bytes_are_those_that_it_keeps(name: str) -> None:
    checkpoint = open_checkpoint(MODELS / name)
    got = host_dense_bytes(checkpoint)
    assert got == kept_bytes(HostDense(checkpoint, batch=1, context_length=64))
    halves = checkpoint.packed_format("embed") in ("f16", "bf16")
    assert halves == (got < 4 * dense_weight_count(checkpoint.config))


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_packed_rows_are_counted_as_they_are(quantize: str, tmp_path: Path) -> None:
    job = Conversion(source=open_checkpoint(TINY), target=tmp_path / "packed", quantize=quantize)
    convert(job, note=lambda line: None, report=lambda done, total: None)
    checkpoint = open_checkpoint(tmp_path / "packed")
    mixed: Any = MixedFormats(checkpoint)
    bytes_of = [host_dense_bytes(source) for source in (checkpoint, mixed)]
    assert bytes_of == [kept_bytes(HostDense(s, batch=1, context_length=64)) for s in (checkpoint, mixed)]
    assert bytes_of[0] < bytes_of[1] < 4 * dense_weight_count(checkpoint.config)


@pytest.mark.parametrize("name", ["relu-llama", "opt"])
def test_the_hosts_workspace_is_what_a_prompt_uses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole piece of 256 tokens; what grows with the threads is small and not counted."""
    monkeypatch.setattr(calls, "_scratch", {})
    with tiny_engine(MODELS / name, mode="dense", context_length=256, max_moves=1) as engine:
        engine.generate([7] * (MOST_TOKENS - 1), replace(GREEDY, max_tokens=1))
        config, planned = engine.config, engine.plan.needs.workspace_bytes
    names = ("tokens", "attended", "qkv", "mixed", "values")
    used = sum(calls._scratch[name].nbytes for name in names)
    used += 4 * MOST_TOKENS * config.d_model  # a prompt's FFN input, which each engine keeps for itself
    used += 4 * (MOST_TOKENS * (config.d_model + config.head_dim) + config.vocab_size)
    assert 0.95 * planned < used < 1.05 * planned
