"""From a name and settings to something that decodes: thresholds, plan, runners."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from jaxtyping import Float

from kairox_jax.balancing import POLICIES, Policy, make_policy
from kairox_jax.config import GUIDE_SETTINGS, ModelConfig, PlacementConfig
from kairox_jax.engine.prefill import CHUNKS
from kairox_jax.engine.programs import cache_length
from kairox_jax.host.callback import check_backend
from kairox_jax.models import check_mode
from kairox_jax.placement import BudgetPlan, Needs, plan_budget, resolve_slot_format, slot_bytes
from kairox_jax.placement.planner import FLOAT_BYTES, REMEDY
from kairox_jax.quant import RecordLayout, scales_bytes

DEFAULT_CONTEXT = 2048
# What a CUDA context and XLA's runtime keep of a card's memory before the first array.
RUNTIME_BYTES = 450_000_000
STREAMED_LAYERS = 2  # the prefill holds one layer's records and receives the next


class DeviceFacts(Protocol):
    """What planning needs of a JAX device."""

    @property
    def platform(self) -> str:
        """The backend's name, such as cpu or gpu."""
        ...

    @property
    def device_kind(self) -> str:
        """The product's name."""
        ...

    def memory_stats(self) -> dict[str, int] | None:
        """Return bytes by name, or None where the device does not tell."""
        ...


def resolve_context(config: ModelConfig, context_length: int | None) -> int:
    """Return the context in tokens: what was asked for, or the model's, at most ``DEFAULT_CONTEXT``.

    Raises:
        ValueError: longer than the model was made for, or not positive.
    """
    if context_length is None:
        return min(config.context_length, DEFAULT_CONTEXT)
    if not 0 < context_length <= config.context_length:
        raise ValueError(
            f"--ctx-size {context_length}: this model takes 1 to {config.context_length} tokens; choose in that range"
        )
    return context_length


def check_dense_settings(placement: PlacementConfig, sparsity: object) -> None:
    """Raise ``ValueError`` for settings that ``dense`` mode would not use."""
    defaults = PlacementConfig()
    names = (
        "policy",
        *GUIDE_SETTINGS,
        "emulated_link",
        "host_callback",
        "slot_format",
    )
    unused = [name for name in names if getattr(placement, name) != getattr(defaults, name)]
    unused += [] if sparsity is None else ["sparsity"]
    if unused:
        flags = ", ".join(map(_flag, unused))
        raise ValueError(f"no effect with --mode dense: {flags}; leave it out, or use --mode exact")


def settings_of_slots(placement: PlacementConfig) -> list[str]:
    """Return the flags, other than their defaults, that only neurons in slots give an effect."""
    defaults = PlacementConfig()
    names = ("policy", *GUIDE_SETTINGS, "slot_format", "emulated_link")
    return [_flag(name) for name in names if getattr(placement, name) != getattr(defaults, name)]


def _flag(setting: str) -> str:
    return "--no-anb" if setting == "anb_enable" else "--" + setting.replace("_", "-")


def check_host_callback(backend: str, mode: str, platform: str) -> None:
    """Raise ``ValueError`` for a host callback that does not run on the platform, or not in the mode."""
    check_backend(backend, platform)
    if mode == "predicted" and backend != "split":
        raise ValueError(
            f"--host-callback {backend} computes every gate, --mode predicted only some: use split, or mode exact"
        )


def dense_thresholds(config: ModelConfig) -> Float[np.ndarray, " L"]:
    """Return thresholds under which ``exact`` is the dense function: |silu(g) u| always exceeds -1."""
    every = -1.0 if config.activation == "silu" else config.activation_threshold
    return np.full(config.num_layers, every, np.float32)


def build_policy(placement: PlacementConfig, *, has_prior: bool) -> Policy:
    """Make the policy with the parameters that it takes from the settings.

    Raises:
        ValueError: unknown policy, or momentum settings given to a policy that has none.
    """
    name = placement.policy_name
    if name == "guide":
        return make_policy(
            "guide",
            beta=placement.tam_beta,
            promote_threshold=placement.tam_threshold,
            evict_threshold=placement.tam_evict,
            anb=placement.anb_enable,
            warm_start=has_prior,
        )
    defaults = PlacementConfig()
    for setting in GUIDE_SETTINGS:
        if getattr(placement, setting) != getattr(defaults, setting) and name in POLICIES:
            raise ValueError(
                f"{_flag(setting)} has no effect with --policy {name}: leave it out, or use guide"
            )
    return make_policy(name)


def dense_weight_count(config: ModelConfig) -> int:
    """Return the number of weights outside the neurons; the neurons' own biases count as theirs."""
    dim, out = config.d_model, config.num_heads * config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    norm = (2 if config.norm == "layernorm" else 1) * dim
    biases = qkv * config.qkv_bias + dim * config.out_bias + dim * config.ffn_bias
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * dim
    if config.positions == "learned":
        tables += config.context_length * dim
    return tables + config.num_layers * ((qkv + out) * dim + 2 * norm + biases) + norm


def estimate_needs(
    config: ModelConfig,
    layouts: Sequence[RecordLayout],
    *,
    slot_format: str,
    context_length: int,
    parallel: int,
    predictor_bytes: int,
    max_moves: int,
    on_accelerator: bool,
) -> Needs:
    """Return the bytes of everything but slots, from sizes alone (no weight is read).

    A slot counts as the mean over layers, which may keep other formats.
    """
    length, chunk = cache_length(context_length), CHUNKS[-1]
    positions = config.num_layers * length * config.num_kv_heads * config.head_dim
    record_bytes = max(layout.record_bytes for layout in layouts)
    # Packed records of two layers, and one of them unpacked; the prefill's biases stay, of all layers.
    unpacked = max(slot_bytes(layout, "float32") for layout in layouts)
    streamed = config.num_neurons * (STREAMED_LAYERS * record_bytes + unpacked)
    bias_bytes = (len(layouts[0].formats) - 1) * FLOAT_BYTES * config.ffn_bias
    streamed += config.num_layers * config.num_neurons * bias_bytes
    wide = max(3 * config.num_neurons, 4 * config.d_model, config.num_heads * length)
    tables = sum(scales_bytes(layout.formats[-1], config.d_model, config.num_neurons) for layout in layouts)
    return Needs(
        dense_bytes=dense_weight_count(config) * FLOAT_BYTES + tables,
        predictor_bytes=predictor_bytes
        if on_accelerator
        else 0,  # on a CPU device the host's kernels read them
        cache_bytes=2 * parallel * positions * FLOAT_BYTES,
        workspace_bytes=streamed + chunk * wide * FLOAT_BYTES + 4 * max_moves * record_bytes,
        runtime_bytes=RUNTIME_BYTES if on_accelerator else 0,
        slot_bytes=-(-sum(slot_bytes(layout, slot_format) for layout in layouts) // len(layouts))
        + bias_bytes,
    )


def device_free_bytes(device: DeviceFacts) -> int | None:
    """Return the free memory of an accelerator, or None for the CPU backend."""
    if device.platform == "cpu":
        return None
    memory = device.memory_stats()
    if memory is None:
        raise ValueError(f"device {device.device_kind} does not tell its memory: name --vram-budget")
    return int(memory["bytes_limit"] - memory["bytes_in_use"])


def _known_free_bytes(device: DeviceFacts, placement: PlacementConfig) -> int | None:
    """Return the free memory, or None where nobody tells it and a budget makes up for that."""
    if placement.vram_budget_bytes is None:
        return device_free_bytes(device)
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf(
            "SC_PAGE_SIZE"
        )  # no card: the machine's memory bounds it
    return None if device.memory_stats() is None else device_free_bytes(device)


def make_plan(
    config: ModelConfig,
    layouts: Sequence[RecordLayout],
    *,
    mode: str,
    placement: PlacementConfig,
    context_length: int,
    parallel: int = 1,
    predictor_bytes: int = 0,
    device: DeviceFacts,
) -> BudgetPlan:
    """Plan the device's memory; see ``plan_budget`` for the errors."""
    check_mode(mode)
    if mode == "dense":
        if placement.gpu_cache_neurons is not None:
            raise ValueError(
                "--gpu-cache-neurons has no effect with --mode dense, which computes every neuron in one place: "
                "leave it out, or use --mode exact"
            )
        placement = replace(placement, gpu_cache_neurons=config.num_neurons)
    needs = estimate_needs(
        config,
        layouts,
        slot_format=resolve_slot_format(placement.slot_format, device.platform),
        context_length=context_length,
        parallel=parallel,
        predictor_bytes=predictor_bytes,
        max_moves=placement.max_moves,
        on_accelerator=device.platform != "cpu",
    )
    plan = plan_budget(
        config,
        placement,
        needs,
        device_free_bytes=_known_free_bytes(device, placement),
        remedy="raise --vram-budget, lower --ctx-size, or use --mode exact" if mode == "dense" else REMEDY,
        what="the whole model, which dense computes" if mode == "dense" else None,
    )
    if mode != "dense":
        return plan
    here = "; without one, host kernels read them where they are" if device.platform == "cpu" else ""
    return replace(plan, reason=f"--mode dense keeps all of them on an accelerator{here}")
