"""Time a token under every causal policy in the real engine, in three regimes of emulated speeds; JSON out.

Emulated by real waiting: the link (``EmulatedLink``), and the host, which takes ``--host-us`` for each neuron.
Activations are played from generated traces as forecasts; model, threads, transfers, slots and costs are real.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.machine import facts
from benchmarks.spread import paired_ratios, spread
from kairox_jax.balancing import POLICIES, make_policy
from kairox_jax.engine.forecast import Forecasted
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.engine.link import EmulatedLink
from kairox_jax.io import open_checkpoint
from kairox_jax.io.trace import Trace
from kairox_jax.placement import load_store
from kairox_jax.sim.generate import GeneratorSettings, generate

LAYERS, WIDTH, NEURONS, VOCAB = 4, 64, 1024, 131
LATENCY_S = 50e-6
# The link's time for a record, over the host's time for it.
REGIMES = {"cpu-bound": 0.1, "balanced": 1.0, "link-bound": 4.0}

Runs = dict[str, dict[str, list[dict[str, float]]]]  # by regime and policy


class Played:
    """Forecasts that are read from a trace; ``step`` says where."""

    predictors: Any = SimpleNamespace(input="adjacent")  # all that the engine asks of them

    def __init__(self, trace: Trace) -> None:
        self.active = [trace.active(step) for step in range(trace.num_steps)]
        self.step = 0

    def __call__(self, layer: int, x: np.ndarray) -> Forecasted:
        """Return what the layer computes."""
        return Forecasted(self.active[self.step][layer][None], None)


def write_model(folder: Path) -> None:
    """Write a SiLU model with random weights: what is forecast counts, whatever its value."""
    rng = np.random.default_rng(0)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": WIDTH, "intermediate_size": NEURONS, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, WIDTH),
        "model.norm.weight": np.ones(WIDTH, np.float32),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", WIDTH), ("k", 32), ("v", 32), ("o", WIDTH)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, WIDTH)
        tensors[at + "mlp.gate_proj.weight"] = matrix(NEURONS, WIDTH)
        tensors[at + "mlp.up_proj.weight"] = matrix(NEURONS, WIDTH)
        tensors[at + "mlp.down_proj.weight"] = matrix(WIDTH, NEURONS)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = np.ones(WIDTH, np.float32)
    save_file(tensors, folder / "model.safetensors")


def slowed(ffn: Any, host_s: float) -> Any:
    """Return a layer's host kernel that takes at least so long for each neuron, by waiting."""

    def run_slowly(h: Any, ids: Any, n: int, *rest: Any, **more: Any) -> None:
        begin = time.perf_counter()
        ffn(h, ids, n, *rest, **more)
        time.sleep(max(0.0, begin + n * host_s - time.perf_counter()))

    return run_slowly


def run(model: Path, policy: str, link_s: float, whole: Trace, args: argparse.Namespace) -> dict[str, float]:
    """Decode the second half of a trace, whose first half is the profile; return times, hits and moves."""
    steps = whole.num_steps // 2
    checkpoint = open_checkpoint(model)
    store, played = load_store(checkpoint), Played(whole.cut(slice(steps, None)))
    hybrid = Hybrid(
        store,
        HostDense(checkpoint, batch=1, context_length=2 * steps),
        config=checkpoint.config,
        thresholds=np.full(LAYERS, -1.0, np.float32),
        policy=make_policy(policy),
        prior=whole.frequencies(slice(0, steps)),
        slots_per_layer=int(args.capacity * NEURONS),
        slot_format="float32",
        max_moves=args.max_moves,
        implementation="xla",
        forecast=played,
        link=EmulatedLink(store.record_bytes(0) / link_s, LATENCY_S),
    )
    # The kernels have no public name: this is all that knows the engine's insides.
    hybrid._ffns = [slowed(ffn, args.host_us * 1e-6) for ffn in hybrid._ffns]
    times, hits, active, moves = [], 0, 0, 0
    try:
        for played.step in range(steps):
            begin = time.perf_counter()
            position = np.array([played.step], np.int32)
            counts = hybrid.step(np.array([5], np.int32), position, np.zeros(1, np.int32))[1]
            times.append((time.perf_counter() - begin) * 1e3)
            hits, active = hits + int(counts.hits.sum()), active + int(counts.active.sum())
            moves += counts.moves.promotions
    finally:
        hybrid.close()
    return {
        # A token of twice the median met another program, or was stopped for it.
        "ms_per_token": statistics.mean(ms for ms in times[4:] if ms < 2 * statistics.median(times[4:])),
        "median_ms": statistics.median(times[4:]),
        "p90_ms": float(np.percentile(times[4:], 90)),
        "hit_rate": hits / active,
        "promotions": moves,
    }


def main() -> None:
    """Print one JSON object; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="each with a trace of its own seed")
    parser.add_argument("--regimes", default=",".join(REGIMES), help="comma-separated")
    parser.add_argument("--add", type=Path, metavar="FILE", help="an earlier output, whose rounds come first")
    parser.add_argument("--capacity", type=float, default=0.25)
    parser.add_argument("--max-moves", type=int, default=128, help="records of one transfer")
    parser.add_argument("--host-us", type=float, default=300.0, help="host time of one neuron, by waiting")
    parser.add_argument(
        "--policies", default=",".join(sorted(set(POLICIES) - {"oracle", "layers", "eager-lambda0"}))
    )
    args = parser.parse_args()
    names, host_s = args.policies.split(","), args.host_us * 1e-6
    found: Runs = {regime: {name: [] for name in names} for regime in REGIMES}
    if args.add is not None:
        found = json.loads(args.add.read_text())["runs"]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for regime in args.regimes.split(","):
            done = len(found[regime][names[0]])
            for seed in range(done, done + args.rounds):
                size = {"num_layers": LAYERS, "num_neurons": NEURONS, "num_steps": 2 * args.steps}
                trace = generate(GeneratorSettings(), seed=seed, **size)
                for name in names if seed % 2 == 0 else names[::-1]:
                    result = run(Path(folder), name, REGIMES[regime] * host_s, trace, args)
                    found[regime][name].append(result)
                    shown = f"{result['ms_per_token']:.1f} ms, hit rate {result['hit_rate']:.3f}"
                    print(f"{regime}, round {seed}, {name}: {shown}", file=sys.stderr)
    settings = {key: value for key, value in vars(args).items() if key not in ("add", "regimes", "rounds")}
    print(json.dumps({**settings, "machine": facts(), "regimes": summary(found), "runs": found}, indent=1))


def summary(found: Runs) -> dict[str, Any]:
    """Return medians over rounds, and each policy's time over that of ``split``, round by round."""
    result: dict[str, Any] = {}
    for regime, policies in found.items():
        if not all(policies.values()):
            continue
        ms = {name: [run["ms_per_token"] for run in runs] for name, runs in policies.items()}
        result[regime] = {
            name: {
                key: statistics.median([run[key] for run in runs])
                for key in ("median_ms", "p90_ms", "hit_rate", "promotions")
            }
            | {"ms_per_token": spread(ms[name])}
            | ({"over_split": paired_ratios(ms[name], ms["split"])} if "split" in ms else {})
            for name, runs in policies.items()
        }
    return result


if __name__ == "__main__":
    main()
