"""From a name and settings to something that decodes: thresholds, plan, runners."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from jaxtyping import Float

from kairox_jax.balancing import POLICIES, Policy, make_policy
from kairox_jax.config import GUIDE_SETTINGS, LEAST_CONTEXT, ModelConfig, PlacementConfig
from kairox_jax.engine.needs import estimate_needs
from kairox_jax.host.callback import check_backend
from kairox_jax.models import check_mode
from kairox_jax.placement import BudgetPlan, plan_budget, resolve_slot_format
from kairox_jax.placement.planner import REMEDY
from kairox_jax.quant import RecordLayout

DEFAULT_CONTEXT = 2048


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
        ValueError: longer than the model was made for, or without room for a prompt and an answer.
    """
    if context_length is None:
        return min(config.context_length, DEFAULT_CONTEXT)
    if not LEAST_CONTEXT <= context_length <= config.context_length:
        raise ValueError(
            f"--ctx-size {context_length}: this model takes {LEAST_CONTEXT} to {config.context_length} tokens of "
            "prompt and answer together; choose in that range"
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


def host_runs_dense(placement: PlacementConfig, platform: str) -> bool:
    """Say whether host kernels run the dense part: the device is the CPU itself, and no program calls the host."""
    return platform == "cpu" and placement.host_callback == "split"


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
    host_dense_bytes: int | None = None,
) -> BudgetPlan:
    """Plan the device's memory; see ``plan_budget`` for the errors, ``estimate_needs`` for the arguments."""
    check_mode(mode)
    # What is asked for in slots, the end of the first line of an error, and what should fit.
    asked, remedy, what = placement.gpu_cache_neurons, REMEDY, None
    if mode == "dense":
        if asked is not None:
            raise ValueError(
                "--gpu-cache-neurons has no effect with --mode dense, which computes every neuron in one place: "
                "leave it out, or use --mode exact"
            )
        if host_dense_bytes is None:
            asked, what = config.num_neurons, "the whole model, which dense computes"
            remedy = "raise --vram-budget, lower --ctx-size, or use --mode exact"
        else:
            asked, remedy = 0, "raise --vram-budget, or lower --ctx-size"
    needs = estimate_needs(
        config,
        layouts,
        slot_format=resolve_slot_format(placement.slot_format, device.platform),
        context_length=context_length,
        parallel=parallel,
        predictor_bytes=predictor_bytes,
        max_moves=placement.max_moves,
        on_accelerator=device.platform != "cpu",
        host_dense_bytes=host_dense_bytes,
    )
    plan = plan_budget(
        config,
        replace(placement, gpu_cache_neurons=asked),
        needs,
        device_free_bytes=_known_free_bytes(device, placement),
        remedy=remedy,
        what=what,
    )
    if mode != "dense":
        return plan
    if host_dense_bytes is None:
        return replace(plan, reason="--mode dense keeps all of them on an accelerator")
    return replace(plan, reason="without an accelerator --mode dense computes all of them by host kernels")
