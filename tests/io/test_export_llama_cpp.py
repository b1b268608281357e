"""Exports in llama.cpp itself: it opens them beside our own keys, and says the same text."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kairox_jax.io import Sparsity, fingerprint, open_checkpoint, shipped_sparsity
from kairox_jax.io.convert import Conversion, convert
from kairox_jax.models import streamed_logits

PROMPTS = (
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "one, two, three, four,",
    "Once upon a time, in a small village by the sea,",
)
# Texts part where two tokens are nearly as probable: Q8_0 moves a logit by up to 0.25 here, and llama.cpp rounds
# activations to 8 bits besides. Of ten prompts tried, seven gave the same 24 tokens, and "Water boils at" parts at a
# margin of 0.07. These three are chosen among the seven: they guard what holds, they do not show that any prompt does.
SAME_TOKENS = 12
needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="the package llama_cpp is not installed"
)
# In a process of its own: the library writes to standard error and may end its process.
GREEDY = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=64, n_threads=1, n_threads_batch=1, verbose=False, logits_all=False)
found = []
for ids in json.loads(sys.argv[2]):
    out = []
    for token in model.generate(ids, temp=0.0, top_k=1):
        out.append(token)
        if len(out) == int(sys.argv[3]):
            break
    found.append(out)
print(json.dumps(found))
"""


def llama_cpp(path: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    command = [sys.executable, "-c", GREEDY, str(path), json.dumps(prompts), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_llama_cpp
def test_it_opens_a_file_with_our_keys(write_llama: Callable[..., Path], tmp_path: Path) -> None:
    source = open_checkpoint(write_llama())
    layers, neurons = source.config.num_layers, source.config.num_neurons
    meta = {"fingerprint": fingerprint(source), "num_neurons": neurons}
    sparsity = Sparsity(np.full(layers, 0.1, np.float32), np.full((layers, neurons), 0.5, np.float32), meta)
    (tmp_path / "predictors.safetensors").write_bytes(bytes(1000))
    job = Conversion(
        source=source,
        target=tmp_path / "out.gguf",
        kind="gguf",
        quantize="f16",
        sparsity=sparsity,
        predictors=tmp_path / "predictors.safetensors",
    )
    convert(job, note=pytest.fail, report=lambda written, total: None)
    prompt = source.tokenizer().encode("hell 12")
    want, found = llama_cpp(source.path, [prompt], 4), llama_cpp(tmp_path / "out.gguf", [prompt], 4)
    assert len(found[0]) == 4 and found == want


@needs_llama_cpp
@pytest.mark.model
def test_the_default_model_says_the_same(default_model: Path, tmp_path: Path) -> None:
    source = open_checkpoint(default_model)
    job = Conversion(
        source=source,
        target=tmp_path / "out.gguf",
        kind="gguf",
        quantize="q8_0",
        sparsity=shipped_sparsity(source),
    )
    convert(job, note=pytest.fail, report=lambda written, total: None)
    prompts = [source.tokenizer().encode(text) for text in PROMPTS]
    found = llama_cpp(tmp_path / "out.gguf", prompts, SAME_TOKENS)
    ids = np.zeros((len(prompts), max(map(len, prompts)) + SAME_TOKENS), np.int32)
    for row, prompt, tokens in zip(ids, prompts, found, strict=True):
        row[: len(prompt) + SAME_TOKENS] = prompt + tokens
    # Each token is the source's most probable one after those before it: so its greedy text is the same.
    logits, _ = streamed_logits(source, ids)
    for rows, prompt, tokens in zip(logits, prompts, found, strict=True):
        greedy = rows[len(prompt) - 1 : len(prompt) - 1 + SAME_TOKENS].argmax(-1)
        assert greedy.tolist() == tokens
