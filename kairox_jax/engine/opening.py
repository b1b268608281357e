"""Opening a model: what is checked before a weight is read, and the runner that its weights become."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from kairox_jax.balancing import Policy, make_policy
from kairox_jax.config import PlacementConfig
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.forecast import DeviceForecast, HostForecast, predictor_bytes
from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.engine.jitted_hybrid import JittedHybrid
from kairox_jax.engine.link import make_link
from kairox_jax.engine.loading import (
    build_policy,
    check_dense_settings,
    check_host_callback,
    dense_thresholds,
    host_runs_dense,
    make_plan,
    resolve_context,
    settings_of_slots,
)
from kairox_jax.engine.needs import host_dense_bytes
from kairox_jax.engine.setup import Setup
from kairox_jax.engine.whole import Whole
from kairox_jax.host import MAX_BATCH, check_threads, limit_threads, thread_count
from kairox_jax.io import Checkpoint, Predictors, Sparsity, Tokenizer, open_checkpoint
from kairox_jax.models import (
    find_predictors,
    find_sparsity,
    gate_thresholded,
    load_decoder,
    predicted_thresholds,
    resolve_thresholds,
)
from kairox_jax.nvidia import limit_device_memory
from kairox_jax.placement import Arena, BudgetPlan, load_store, record_layouts, resolve_slot_format
from pallas_kernels.implementations import resolve_implementation

logger = logging.getLogger("kairox")


class Opened(NamedTuple):
    """A model that is ready to run: one of ``whole`` and ``hybrid`` is there."""

    setup: Setup
    tokenizer: Tokenizer
    chat_template: str | None
    whole: Whole | None
    hybrid: Hybrid | None


def open_model(
    model: str | Path,
    *,
    mode: str,
    placement: PlacementConfig,
    context_length: int | None,
    threads: int | None,
    sparsity: str | Path | None,
    predictors: str | Path | None,
    parallel: int,
) -> Opened:
    """Open a checkpoint, plan the device's memory and load; see ``Engine`` for arguments and errors."""
    checkpoint = open_checkpoint(model)
    if placement.vram_budget_bytes is not None:
        limit_device_memory(placement.vram_budget_bytes)
    setup, forecasts = _set_up(
        checkpoint,
        mode=mode,
        placement=placement,
        context_length=context_length,
        sparsity=sparsity,
        predictors=predictors,
        parallel=parallel,
    )
    found = None if mode == "dense" else find_sparsity(checkpoint, sparsity)
    if threads is not None:
        limit_threads(threads)
        setup = replace(setup, threads=thread_count())
    tokenizer = checkpoint.tokenizer()
    if mode == "dense" and setup.device.platform != "cpu":
        whole = Whole(load_decoder(checkpoint), batch=parallel, context_length=setup.context_length)
        whole.warm_up()
        return Opened(setup, tokenizer, checkpoint.chat_template, whole, None)
    if mode == "dense":
        every = dense_thresholds(setup.config)
        hybrid = _load_hybrid(setup, checkpoint, every, make_policy("static"), None, placement, None)
    else:
        setup, hybrid = _load_sparse(setup, checkpoint, found, placement, forecasts)
    return Opened(setup, tokenizer, checkpoint.chat_template, None, hybrid)


def _set_up(
    checkpoint: Checkpoint,
    *,
    mode: str,
    placement: PlacementConfig,
    context_length: int | None,
    sparsity: str | Path | None,
    predictors: str | Path | None,
    parallel: int,
) -> tuple[Setup, Predictors | None]:
    """Check what can be checked before a weight is read, and plan the device's memory.

    Returns:
        The setup, and the predictors of predicted mode.
    """
    if not 1 <= parallel <= MAX_BATCH:
        raise ValueError(f"--parallel {parallel}: choose 1 to {MAX_BATCH} sequences")
    if predictors is not None and mode != "predicted":
        raise ValueError(f"--predictors has no effect with --mode {mode}: leave it out, or use predicted")
    forecasts = find_predictors(checkpoint, predictors) if mode == "predicted" else None
    device = jax.devices()[0]
    check_host_callback(placement.host_callback, mode, device.platform)
    length = resolve_context(checkpoint.config, context_length)
    plan = make_plan(
        checkpoint.config,
        record_layouts(checkpoint),
        mode=mode,
        placement=placement,
        context_length=length,
        parallel=parallel,
        predictor_bytes=predictor_bytes(forecasts),
        device=device,
        host_dense_bytes=host_dense_bytes(checkpoint)
        if host_runs_dense(placement, device.platform)
        else None,
    )
    setup = Setup(
        config=checkpoint.config,
        mode=mode,
        device=device,
        context_length=length,
        parallel=parallel,
        plan=plan,
        threads=thread_count(),
        policy_name=None if mode == "dense" else placement.policy_name,
        implementation=resolve_implementation("auto", device.platform),
        slot_format=resolve_slot_format(placement.slot_format, device.platform),
        host_activations=placement.host_activations,
    )
    if mode == "dense":
        check_dense_settings(placement, sparsity)
        _check_dense_inputs(setup)
        return setup, None
    build_policy(placement, has_prior=True)
    if not setup.plan.slots_per_layer and (idle := settings_of_slots(placement)):
        logger.warning(
            "%s: nothing has a slot, so it moves and changes nothing; add --gpu-cache-neurons N",
            ", ".join(idle),
        )
    return setup, forecasts


def _check_dense_inputs(setup: Setup) -> None:
    """Raise ``ValueError`` where the device runs the whole model, and rounded inputs of the host are asked for."""
    if setup.device.platform != "cpu" and setup.host_activations != PlacementConfig.host_activations:
        raise ValueError(
            f"--host-activations {setup.host_activations} has no effect with --mode dense on "
            f"{setup.device.platform}: leave it out, or use --mode exact"
        )


def _load_sparse(
    setup: Setup,
    checkpoint: Checkpoint,
    found: Sparsity | None,
    placement: PlacementConfig,
    forecasts: Predictors | None,
) -> tuple[Setup, Hybrid]:
    """Load a model with its thresholds, profile and policy; thresholds can change its activation."""
    checkpoint = gate_thresholded(checkpoint, found)
    setup = replace(setup, config=checkpoint.config)
    thresholds = (resolve_thresholds if forecasts is None else predicted_thresholds)(setup.config, found)
    prior = None if found is None else found.frequency
    if prior is None:
        logger.warning("no activation profile for this model: the policy starts without knowing any neuron")
    policy = build_policy(placement, has_prior=prior is not None)
    return setup, _load_hybrid(setup, checkpoint, thresholds, policy, prior, placement, forecasts)


def _load_hybrid(
    setup: Setup,
    checkpoint: Checkpoint,
    thresholds: Float[np.ndarray, " L"],
    policy: Policy,
    prior: Float[np.ndarray, "L F"] | None,
    placement: PlacementConfig,
    predictors: Predictors | None,
) -> Hybrid:
    """Load the records and the dense part; where the device is the CPU itself, host kernels run the latter."""
    platform, callback = setup.device.platform, placement.host_callback
    sizes: dict[str, int] = dict(batch=setup.parallel, context_length=setup.context_length)
    # Beside slots on a CPU device XLA's part took two to four times as long with weights in large pages, for a reason
    # that was not found: there each matrix keeps an allocation of its own.
    arena = Arena(0) if platform == "cpu" and setup.plan.slots_per_layer else Arena()
    if host_runs_dense(placement, platform):
        dense = HostDense(checkpoint, activations=placement.host_activations, arena=arena, **sizes)
    else:
        dense = DeviceDense(checkpoint, **sizes)
    forecast = None
    if predictors is not None:
        on_host = isinstance(dense, HostDense)
        forecast = HostForecast(predictors, batch=setup.parallel) if on_host else DeviceForecast(predictors)
    settings: dict[str, Any] = dict(
        config=setup.config,
        thresholds=thresholds,
        policy=policy,
        prior=prior,
        slots_per_layer=setup.plan.slots_per_layer,
        slot_format=setup.slot_format,
        max_moves=placement.max_moves,
        implementation=setup.implementation,
        forecast=forecast,
        link=make_link(placement.emulated_link),
        host_activations=placement.host_activations,
    )
    store = load_store(checkpoint, arena=arena)
    if callback == "split":
        return Hybrid(store, dense, **settings)
    assert isinstance(dense, DeviceDense)
    return JittedHybrid(store, dense, host_callback=callback, platform=platform, **settings)


def plan_only(
    model: str | Path,
    *,
    mode: str = "exact",
    placement: PlacementConfig | None = None,
    context_length: int | None = None,
    threads: int | None = None,
    sparsity: str | Path | None = None,
    predictors: str | Path | None = None,
    parallel: int = 1,
) -> BudgetPlan:
    """Plan the memory of a model without reading its weights; see ``Engine`` for arguments and errors."""
    if threads is not None:
        check_threads(threads)
    checkpoint = open_checkpoint(model)
    setup, _ = _set_up(
        checkpoint,
        mode=mode,
        placement=PlacementConfig() if placement is None else placement,
        context_length=context_length,
        sparsity=sparsity,
        predictors=predictors,
        parallel=parallel,
    )
    if sparsity is not None:
        find_sparsity(checkpoint, sparsity)
    return setup.plan
