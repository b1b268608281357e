"""The engine: a loaded model that generates text and counts what it did."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from kairox_jax.config import GenerationConfig, PlacementConfig
from kairox_jax.engine.dense_part import DeviceDense
from kairox_jax.engine.hybrid import Hybrid
from kairox_jax.engine.loading import (
    build_policy,
    find_sparsity,
    make_plan,
    resolve_context,
    resolve_thresholds,
)
from kairox_jax.engine.sampling import make_rng, sample
from kairox_jax.engine.statistics import Statistics
from kairox_jax.engine.text import TextStream
from kairox_jax.engine.whole import Whole
from kairox_jax.host import thread_count
from kairox_jax.io import TraceRecorder, open_checkpoint
from kairox_jax.models import load_decoder
from kairox_jax.placement import BudgetPlan, load_store
from pallas_kernels.implementations import resolve_implementation

logger = logging.getLogger("kairox")


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished generation.

    Attributes:
        text: what was generated, without the stop text.
        prompt_token_ids, token_ids: ids of the prompt and of the generated text (no end-of-sequence token).
        finish_reason: "stop" (end of sequence, or a stop text) or "length".
        stats: counts and times.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    stats: Statistics

    def to_json(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        return {
            "text": self.text,
            "prompt_token_ids": self.prompt_token_ids,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            **self.stats.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of streamed text; the last one carries the result."""

    text: str
    token_id: int | None = None
    result: GenerationResult | None = None


class Engine:
    """Loads a model and generates text with it, one request at a time.

    Args:
        model: a registered name, a local path, or a Hugging Face repository.
        mode: "dense" (every neuron, on the device) or "exact" (residents on the device, the active rest on the host).
        placement: memory budget and policy.
        context_length: positions of a sequence; None takes the model's, at most 2048.
        threads: host threads; None takes the physical cores.
        sparsity: folder with thresholds and profile; None takes the shipped ones.

    Raises:
        ValueError: settings that cannot be honoured; the message says the remedy.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        mode: str = "exact",
        placement: PlacementConfig | None = None,
        context_length: int | None = None,
        threads: int | None = None,
        sparsity: str | Path | None = None,
    ) -> None:
        placement = PlacementConfig() if placement is None else placement
        checkpoint = open_checkpoint(model)
        self.config = config = checkpoint.config
        self.device = jax.devices()[0]
        self.context_length = resolve_context(config, context_length)
        self.plan = make_plan(
            config, mode=mode, placement=placement, context_length=self.context_length, device=self.device
        )
        self.mode = mode
        self.threads = thread_count(threads)
        self.tokenizer = checkpoint.tokenizer()
        self.chat_template = checkpoint.chat_template
        self._whole: Whole | None = None
        self._hybrid: Hybrid | None = None
        self._cached: list[int] = []
        if mode == "dense":
            self.policy_name = None
            self._whole = Whole(load_decoder(checkpoint), context_length=self.context_length)
            return
        found = find_sparsity(checkpoint, sparsity)
        thresholds = resolve_thresholds(config, found)
        prior = None if found is None else found.frequency
        if prior is None:
            logger.warning("no activation profile for this model: slots start with the first neurons of each layer")
        self.policy_name = placement.policy
        policy = build_policy(placement, has_prior=prior is not None)
        self.implementation = resolve_implementation("auto", self.device.platform)
        self._hybrid = Hybrid(
            load_store(checkpoint),
            DeviceDense(checkpoint, batch=1, context_length=self.context_length),
            config=config,
            thresholds=thresholds,
            policy=policy,
            prior=prior,
            slots_per_layer=self.plan.slots_per_layer,
            max_moves=placement.max_moves,
            implementation=self.implementation,
        )
