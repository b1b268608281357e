"""One configuration of our engine, as ``bench_cpu_decode`` drives it. Runs in a process of its own."""

from __future__ import annotations

import importlib
from argparse import Namespace
from time import perf_counter
from typing import Any

from kairox_jax.commands.launch import prepare_environment

prepare_environment(Namespace(vram_budget=None))  # before JAX is imported

import jax  # noqa: E402

from benchmarks.time_parts import PartTimes, hook_cost_s, hooked, parts_ms, split_layers  # noqa: E402
from benchmarks.touched_bytes import TouchedBytes, cache_bytes, neuron_bytes, seen_positions  # noqa: E402
from kairox_jax.config import GenerationConfig, ModelConfig, PlacementConfig  # noqa: E402
from kairox_jax.engine import Engine  # noqa: E402
from kairox_jax.engine.programs import attend_length  # noqa: E402
from kairox_jax.io import open_checkpoint  # noqa: E402

F32_BYTES = 4


def greedy(tokens: int) -> GenerationConfig:
    """Return settings that take the most probable token, ``tokens`` times, whatever it is."""
    return GenerationConfig(max_tokens=tokens, temperature=0, seed=0, ignore_eos=True)


def cache_position_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Return the bytes of keys and values of one position, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * element_bytes


class KairoxRival:
    """An engine with its measurements.

    Args:
        model: name or path.
        mode: "dense", "exact" or "predicted".
        slots: device slots a layer, but in ``dense`` mode.
        context: positions.
        activations: of the host's kernels: "float32" or "int8".
    """

    def __init__(
        self, *, model: str, mode: str, slots: int | None, context: int, activations: str = "float32"
    ) -> None:
        begin = perf_counter()
        placement = PlacementConfig(gpu_cache_neurons=slots, host_activations=activations)
        self.engine = Engine(model, mode=mode, placement=placement, context_length=context)
        self.load_s = perf_counter() - begin
        if self.engine.device.platform != "cpu":
            raise ValueError(
                f"this benchmark measures the CPU, not the device {self.engine.device}: set JAX_PLATFORMS=cpu"
            )
        self._model = model
        self._last: dict[str, Any] = {}
        # The runners have no public name: this and HOOKS are all that knows the engine's insides.
        self._whole: Any = self.engine._whole
        self._hybrid: Any = self.engine._hybrid

    def facts(self) -> dict[str, Any]:
        """Describe what was loaded; ``model_path`` is for llama.cpp and is not kept."""
        engine, checkpoint = self.engine, open_checkpoint(self._model)
        return {
            "load_s": self.load_s,
            "threads": engine.threads,
            "description": engine.describe(),
            "slots_per_layer": engine.plan.slots_per_layer if self._hybrid is not None else None,
            "vram_bytes": engine.plan.to_json(),
            "model_path": str(checkpoint.path),
            "weights_bytes": checkpoint.num_bytes,
            "cache_elements": cache_position_bytes(engine.config, 1),
            "device": f"{engine.device.platform}:{engine.device.device_kind}",
            "versions": {
                name: importlib.import_module(name).__version__ for name in ("jax", "jaxlib", "numba", "flax")
            },
        }

    def encode(self, text: str) -> dict[str, Any]:
        """Return a text's token ids."""
        return {"ids": self.engine.tokenizer.encode(text)}

    def prefill(self, ids: list[int]) -> dict[str, Any]:
        """Run a prompt and one token."""
        stats = self.engine.generate(ids, greedy(1)).stats
        return {"tokens_per_s": stats.prefill_tokens_per_s}

    def decode(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Run a prompt and ``tokens`` decode steps."""
        result = self.engine.generate(ids, greedy(tokens + 1))
        self._last = result.stats.to_json()
        return {"tokens_per_s": result.stats.decode_tokens_per_s, "token_ids": result.token_ids}

    def counts(self, tokens: int) -> dict[str, Any]:
        """Tell what the last decode touched and where its neurons were, for ``tokens`` steps."""
        names = (
            "hit_rate",
            "active",
            "hits",
            "residual",
            "resident",
            "promotions",
            "evictions",
            "link_bytes",
        )
        touched = self._touched_by_whole(tokens) if self._hybrid is None else self._touched_by_hybrid(tokens)
        return {"touched_bytes": touched.to_json(), "last_decode": {name: self._last[name] for name in names}}

    def parts(self, ids: list[int], tokens: int) -> dict[str, Any]:
        """Decode with clocks around the engine's parts; empty for ``dense``, which has no such parts."""
        if self._hybrid is None:
            return {}
        times = PartTimes()
        roots = {"hybrid": self._hybrid, "sequence": importlib.import_module("kairox_jax.engine.sequence")}
        with hooked(roots, times, jax.block_until_ready):
            stream = self.engine.stream(ids, greedy(tokens + 1))
            next(stream)  # the prefill and the first token
            times.reset()
            begin, inside_ms = perf_counter(), [0.0, 0.0]
            for chunk in stream:
                if chunk.step is not None:
                    inside_ms[0] += chunk.step.times.gpu_ms
                    inside_ms[1] += chunk.step.times.cpu_ms
            total_s = perf_counter() - begin
        seconds = split_layers(times.seconds, *(ms * 1e-3 for ms in inside_ms))
        return {
            "parts_ms": parts_ms(seconds, total_s, tokens),
            "total_ms": total_s * 1e3 / tokens,
            "clocks_per_token": times.calls / tokens,
            "clock_cost_us": hook_cost_s() * 1e6,
        }

    def _touched_by_whole(self, steps: int) -> TouchedBytes:
        config, whole = self.engine.config, self._whole
        rows = (config.d_model * F32_BYTES,) * (3 if config.gated else 2)
        neurons = config.num_layers * config.num_neurons * sum(rows)
        blocks = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.blocks))
        seen = seen_positions(self._last["prompt_tokens"], steps)
        # XLA's attention reads the cache in a few fixed lengths, so that few programs are compiled.
        read = [attend_length(positions, whole.length) for positions in seen]
        table = (
            whole.output.nbytes + whole.embedding.nbytes // config.vocab_size + whole.out_norm.scale.nbytes
        )
        return TouchedBytes(
            other_weights=blocks - neurons + table,
            host_neurons=0.0,
            device_neurons=neurons,
            kv_cache=cache_bytes(read, cache_position_bytes(config, F32_BYTES)),
        )

    def _touched_by_hybrid(self, steps: int) -> TouchedBytes:
        config, hybrid, dense = self.engine.config, self._hybrid, self._hybrid.dense
        layers, slots = config.num_layers, self.engine.plan.slots_per_layer
        # SiLU's rule needs gate and up of every neuron; a ReLU neuron ends with a gate at zero or below.
        always = 2 if config.gated and config.activation == "silu" else 1
        outside = config.num_neurons - self._last["resident"] / layers
        residual = self._last["residual"] / steps / layers
        forecasts = hybrid.forecast
        if forecasts is not None:  # of a forecast neuron the whole record is read, of others nothing
            outside, always = residual, 2
        host = neuron_bytes(outside, residual, hybrid.store.layouts[0].row_bytes, always=always)
        host += hybrid.store.scales[0].nbytes if hybrid.store.scales[0] is not None and residual else 0
        device = 0.0
        if slots:
            # XLA's CPU programs read every row of every slot and mask afterwards.
            rows = [
                sum(leaf.nbytes for leaf in jax.tree.leaves(row)) // slots for row in hybrid.migrator.slots[0]
            ]
            device = neuron_bytes(slots, slots, rows, always=len(rows))
        weights = sum(
            w.wqkv.data.nbytes + w.wo.data.nbytes + w.norm.nbytes + w.ffn_norm.nbytes for w in dense.weights
        )
        table = dense.output.data.nbytes + dense.embedding.data[0].nbytes + dense.out_norm.scale.nbytes
        seen = seen_positions(self._last["prompt_tokens"], steps)
        return TouchedBytes(
            other_weights=weights + table + (0 if forecasts is None else forecasts.predictors.nbytes),
            host_neurons=layers * host,
            device_neurons=layers * device,
            kv_cache=cache_bytes(seen, cache_position_bytes(config, dense.keys.itemsize)),
        )
