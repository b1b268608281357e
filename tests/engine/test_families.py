"""Every family through the engine, wherever its neurons live: the logits of other implementations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy_reference import forward
from safetensors.numpy import save_file
from tiny_model import DENSE_PARTS, MODELS, all_logits, hybrid_of, run_step, tiny_engine

from kairox_jax.balancing import Plan, Shape
from kairox_jax.engine.prefill import CHUNKS
from kairox_jax.engine.whole import Whole
from kairox_jax.io import open_checkpoint
from kairox_jax.io.hf_config import hf_config
from kairox_jax.io.hf_model import hf_entries
from kairox_jax.models import load_decoder

TOLERANCE = 2e-4  # of the largest |logit|; measured: 6e-7, and 4e-5 where the expected ones are in float16
FAMILIES = sorted(path.parent.name for path in MODELS.glob("*/expected.npz"))
SILU = ["llama-old-keys", "llama3-rope"]
SPARSE = sorted(set(FAMILIES) - set(SILU))
# Compiling is what these tests cost: where a path has been compiled for a family, its relatives are left out.
ON_DEVICE = ["bamboo", "falcon-one-kv", "opt", "prosparse-llama", "relu-falcon", "sparse-qwen2"]
DENSE = [*SILU, "bamboo", "mistral-window", "opt", "prosparse-llama", "relu-falcon", "sparse-qwen2"]
PROMPT = 6
PHASE = 3  # steps at each residency


class Tour:
    """Goes from no residents to every other neuron, to all, and then to another random half at each step."""

    warm_start = False

    def init(self, shape: Shape, prior: Any) -> list[int]:
        self.num_neurons, self.rng = shape.num_neurons, np.random.default_rng(5)
        return [0] * shape.num_layers

    def plan(
        self, state: list[int], layer: int, active: Any, resident: np.ndarray, costs: Any
    ) -> tuple[list[int], Plan]:
        state[layer] += 1
        phase, neurons = state[layer] // PHASE, np.arange(self.num_neurons)
        target = [neurons < 0, neurons % 2 == 0, neurons >= 0, self.rng.random(len(neurons)) < 0.5]
        wanted = target[min(phase, 3)]
        load, evict = np.flatnonzero(wanted & ~resident), np.flatnonzero(resident & ~wanted)
        return state, Plan(load.astype(np.int32), evict.astype(np.int32))

    def feedback(self, state: list[int], layer: int | None, times: Any) -> list[int]:
        return state


def expected(name: str) -> tuple[list[int], np.ndarray]:
    """Return a text's token ids and its logits [T, V]."""
    with np.load(MODELS / name / "expected.npz") as file:
        return file["input_ids"][0].tolist(), file["logits"][0]


def worst(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference as a share of the largest |logit|; NaN passes no comparison."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


def toured(folder: Path, dense_part: str, ids: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """Return positions and the logits there while the residents change from none to all and at random.

    At the end come two prefills over what the steps wrote: of all that one piece holds, and of its second half.
    """
    config = open_checkpoint(folder).config
    every = config.num_layers * config.num_neurons
    slots: dict[str, Any] = {"gpu_cache_neurons": config.num_neurons, "max_moves": config.num_neurons}
    with tiny_engine(folder, dense_part=dense_part, policy=Tour, **slots, context_length=48) as engine:
        hybrid, residents, hits, active = hybrid_of(engine), [], [], []
        text, piece = np.asarray(ids, np.int32), CHUNKS[0]
        rows = [np.array(hybrid.prefill_logits(text[:PROMPT], 0, 0))]
        for at in range(PROMPT, len(ids)):
            residents.append(hybrid.num_resident)
            logits, counts = run_step(engine, ids[at], at)
            rows.append(logits)
            hits.append(int(counts.hits.sum()))
            active.append(int(counts.active.sum()))
            hybrid.settle()  # so that each step computes with what the last one asked for
        for start in (0, piece // 2):
            rows.append(np.array(hybrid.prefill_logits(text[start:piece], start, 0)))
    assert residents[: 3 * PHASE] == [0] * PHASE + [every // 2] * PHASE + [every] * PHASE
    assert hits[:PHASE] == [0] * PHASE and hits[2 * PHASE : 3 * PHASE] == active[2 * PHASE : 3 * PHASE]
    assert len(set(residents[3 * PHASE :])) > 1 and all(0 < n for n in active)
    return [*range(PROMPT - 1, len(ids)), piece - 1, piece - 1], np.stack(rows)


def test_all_families_are_there() -> None:
    assert len(FAMILIES) == 17 and set(FAMILIES) > set(SILU) and set(ON_DEVICE) < set(SPARSE)


@pytest.mark.slow  # kernels of many forms
@pytest.mark.parametrize("name", SPARSE)
def test_exact_on_the_host(name: str) -> None:
    ids, want = expected(name)
    positions, got = toured(MODELS / name, "host", ids)
    assert worst(got, want[positions]) <= TOLERANCE


@pytest.mark.parametrize("name", ON_DEVICE)
def test_exact_on_the_device(name: str) -> None:
    ids, want = expected(name)
    positions, got = toured(MODELS / name, "device", ids)
    assert worst(got, want[positions]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_dense_by_host_kernels(name: str) -> None:
    ids, want = expected(name)
    with tiny_engine(MODELS / name, mode="dense", context_length=48) as engine:
        assert hybrid_of(engine).num_resident == 0
        assert worst(all_logits(engine, ids, prompt=PROMPT), want[PROMPT - 1 :]) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama3-rope", "mistral-window", "opt", "relu-falcon"])
def test_dense_of_an_accelerator(name: str) -> None:
    ids, want = expected(name)
    whole = Whole(load_decoder(open_checkpoint(MODELS / name)), batch=1, context_length=48)
    rows = [whole.prefill_logits(np.asarray(ids[:PROMPT], np.int32), 0, 0)]
    steps = ((np.array([n], np.int32) for n in (ids[at], at, 0)) for at in range(PROMPT, len(ids)))
    rows += [whole.step(*step)[0][0] for step in steps]
    assert worst(np.stack(rows), want[PROMPT - 1 :]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "policy", "dense_part"),
    [
        ("opt", "guide", "device"),
        ("opt", "lru", "host"),
        ("relu-falcon", "lru", "device"),
        ("sparse-qwen2", "guide", "host"),
    ],
)
def test_while_a_policy_moves_neurons(name: str, policy: str, dense_part: str) -> None:
    ids, want = expected(name)
    half = open_checkpoint(MODELS / name).config.num_neurons // 2
    eager = {"tam_beta": 0.5, "tam_threshold": 0.45, "tam_evict": 0.3} if policy == "guide" else {}
    settings: dict[str, Any] = {"policy": policy, "dense_part": dense_part, "max_moves": 16, **eager}
    with tiny_engine(MODELS / name, gpu_cache_neurons=half, **settings) as engine:
        rows, moved = [], np.zeros(2, int)
        rows.append(np.array(hybrid_of(engine).prefill_logits(np.asarray(ids[:PROMPT], np.int32), 0, 0)))
        for at in range(PROMPT, len(ids)):
            logits, counts = run_step(engine, ids[at], at)
            rows.append(logits)
            hybrid_of(engine).settle()
            moved += (counts.moves.promotions, counts.moves.evictions)
    assert worst(np.stack(rows), want[PROMPT - 1 :]) <= TOLERANCE
    assert moved.min() > 20, "the policy did not move"


@pytest.mark.parametrize("name", SILU)
def test_replay_3_exact_of_a_silu_model_says_what_can_be_done(name: str) -> None:
    with pytest.raises(ValueError, match="SiLU.*--mode dense.*--sparsity"), tiny_engine(MODELS / name):
        pass


ODD = {
    # Heads of 6 and a width of 36, in three groups of two.
    "llama": {
        "model_type": "mistral",
        "hidden_act": "relu",
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 48,
        "sliding_window": 7,
        "vocab_size": 61,
    },
    "opt": {
        "model_type": "opt",
        "activation_function": "relu",
        "hidden_size": 20,
        "ffn_dim": 33,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 18,
        "vocab_size": 61,
    },
    # An FFN with neither gate nor zeros.
    "silu": {
        "model_type": "opt",
        "activation_function": "silu",
        "hidden_size": 32,
        "ffn_dim": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 18,
        "vocab_size": 61,
    },
    # The 7B's layout: one norm, one key head for all, heads of 14.
    "falcon": {
        "model_type": "falcon",
        "activation": "relu",
        "hidden_size": 42,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "multi_query": True,
        "new_decoder_architecture": False,
        "bias": True,
        "max_position_embeddings": 48,
        "vocab_size": 61,
    },
}


@pytest.mark.parametrize("dense_part", DENSE_PARTS)
@pytest.mark.parametrize("name", ODD)
def test_sizes_that_fill_no_block(
    name: str, dense_part: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Also: a padded piece of prompt, and a window, that end beyond the learned positions."""
    (tmp_path / "config.json").write_text(json.dumps(ODD[name]))
    config = hf_config(tmp_path, add_bos=False)
    tensors = {}
    for canonical, entry in hf_entries(config, {}).items():
        spread = 0.3 if "norm" in canonical or ".b" in canonical else 0.25
        offset = 1.0 if "norm" in canonical and not canonical.endswith("bias") else 0.0
        tensors[entry.source] = (rng.normal(size=entry.shape) * spread + offset).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    ids = rng.integers(3, config.vocab_size, 18)
    want = forward(open_checkpoint(tmp_path), ids[None])[0]
    mode: dict[str, Any] = {"gpu_cache_neurons": config.num_neurons // 2}
    mode = {"mode": "dense"} if config.activation == "silu" else mode
    with tiny_engine(tmp_path, dense_part=dense_part, context_length=18, **mode) as engine:
        got = all_logits(engine, ids.tolist(), prompt=17)
    assert worst(got, want[16:]) <= 2e-6
