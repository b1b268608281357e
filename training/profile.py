"""`kairox profile`: run a model over text files and write what its neurons did, and a trace where asked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from tqdm import tqdm

from kairox_jax.io import fingerprint, open_checkpoint
from kairox_jax.io.profile import Profile, save_profile
from kairox_jax.models import find_sparsity, load_decoder, resolve_thresholds
from training.coactivation import Reservoir, layer_sets, top_partners
from training.forward import LayeredModel, embed, layered
from training.powerinfer_activations import read_activations
from training.profile_pass import DISTANCES, LayerSums, profile_layer
from training.profile_summary import summary
from training.profile_trace import TraceWriter
from training.report import installed_versions
from training.text_stream import TextStream


class Accumulator:
    """Sums over the batches of a text; its size does not depend on the text.

    Args:
        num_layers, num_neurons: L and F.
        sample_tokens: tokens whose active sets are kept.
    """

    def __init__(self, num_layers: int, num_neurons: int, *, sample_tokens: int) -> None:
        self.tokens = 0
        self.num_neurons = num_neurons
        self.neurons = np.zeros((num_layers, num_neurons), np.int64)
        self.shares = np.zeros((num_layers, 2))  # sum and sum of squares over tokens
        self.cosine = np.zeros((num_layers, 2))  # summed over windows, to earlier layers
        self.again = np.zeros((num_layers, DISTANCES))
        self.before = np.zeros((num_layers, DISTANCES))  # active at t, over the t that have a t + d
        self.windows = 0
        self.reservoir = Reservoir(sample_tokens)

    def add(self, layer: int, sums: LayerSums, rows: int) -> None:
        """Take one layer of a batch, of which the first ``rows`` windows count.

        Raises:
            ValueError: the residual stream is NaN or infinite.
        """
        cosine = np.asarray(sums.cosine)[:rows].astype(np.float64)
        if not np.isfinite(cosine[:, : min(layer, 2)]).all():
            raise ValueError(
                f"the residual stream of layer {layer} is NaN or infinite: the checkpoint is damaged or overflows "
                "float32"
            )
        active = np.asarray(sums.active)[:rows].astype(np.int64)
        self.neurons[layer] += np.asarray(sums.neurons)[:rows].sum(axis=0)
        share = active / self.num_neurons
        self.shares[layer] += share.sum(), np.square(share).sum()
        self.cosine[layer] += cosine.sum(axis=0)
        self.again[layer] += np.asarray(sums.again)[:rows].sum(axis=0, dtype=np.float64)
        length = active.shape[1]
        running = active.sum(axis=0).cumsum()
        for distance in range(1, min(DISTANCES, length - 1) + 1):
            self.before[layer, distance - 1] += running[length - distance - 1]

    def finish_batch(self, packed: np.ndarray, windows: int) -> None:
        """Count a batch; ``packed`` is [tokens, L, ceil(F / 8)]."""
        self.reservoir.add(packed)
        self.tokens += len(packed)
        self.windows += windows

    def profile(self, *, partners: int, meta: dict[str, Any]) -> Profile:
        """Return what was measured, with each neuron's best partners in the sample."""
        layers = len(self.neurons)
        mean = self.shares[:, 0] / self.tokens
        spread = np.sqrt(np.maximum(self.shares[:, 1] / self.tokens - mean**2, 0))
        cosine = np.full((layers, 2), np.nan, np.float32)
        for distance in (1, 2):  # a layer's sums are to earlier layers; the profile's to later ones
            cosine[: layers - distance, distance - 1] = self.cosine[distance:, distance - 1] / self.windows
        sample = self.reservoir.rows()
        found = [
            top_partners(layer_sets(sample, layer, self.num_neurons), partners) for layer in range(layers)
        ]
        with np.errstate(invalid="ignore"):
            again = self.again / np.where(self.before > 0, self.before, np.nan)
        return Profile(
            frequency=(self.neurons / self.tokens).astype(np.float32),
            active_frac=np.stack([mean, spread], axis=1).astype(np.float32),
            cosine=cosine,
            reactivation=again.astype(np.float32),
            partners=np.stack([ids for ids, _ in found]),
            together=np.stack([share for _, share in found]),
            sample=sample,
            meta=meta,
        )


def measure_profile(
    model: LayeredModel,
    thresholds: Float[np.ndarray, " L"],
    stream: TextStream,
    *,
    batch: int,
    sample_tokens: int,
    trace: TraceWriter | None,
    tick: Any,
) -> Accumulator:
    """Run a model over a stream of windows.

    Args:
        model: any model of ours.
        thresholds: one a layer.
        stream: of token windows.
        batch: windows run at a time.
        sample_tokens: tokens whose active sets are kept for co-activation.
        trace: takes every token's active sets, or None.
        tick: called with the bytes read since the last call.

    Raises:
        ValueError: no text, or a residual stream that is not finite.
    """
    config = model.config
    sums = Accumulator(config.num_layers, config.num_neurons, sample_tokens=sample_tokens)
    values = [jnp.float32(value) for value in thresholds]
    read = 0
    for ids in stream.batches(batch):
        padded = np.concatenate([ids, np.repeat(ids[:1], batch - len(ids), axis=0)])  # one compiled shape
        packed = _run_batch(model, values, padded, len(ids), sums)
        sums.finish_batch(packed, len(ids))
        if trace is not None:
            trace.add(packed, ids.reshape(-1))
        tick(stream.read_bytes - read)
        read = stream.read_bytes
    return sums


def _run_batch(
    model: LayeredModel, thresholds: list[Any], ids: Int[np.ndarray, "B T"], rows: int, sums: Accumulator
) -> np.ndarray:
    x = embed(model, ids)
    earlier = (jnp.ones_like(x), jnp.ones_like(x))  # before the first layers nothing is compared
    found = []
    for state, threshold in zip(model.layers, thresholds, strict=True):
        x, after, of_layer = profile_layer(model.graph, state, x, threshold, earlier)
        earlier = (after, earlier[0])
        found.append(of_layer)
    packed = []
    for layer, of_layer in enumerate(jax.device_get(found)):
        sums.add(layer, of_layer, rows)
        packed.append(of_layer.packed[:rows].reshape(-1, of_layer.packed.shape[-1]))
    return np.stack(packed, axis=1)


def run(options: argparse.Namespace) -> int:
    """Run the command; print a summary of what was written.

    Args:
        options: model, text, out, trace, sparsity, powerinfer, window, batch, sample_tokens, partners.

    Raises:
        ValueError: settings, text or a model that cannot be used.
    """
    if bool(options.text) == (options.powerinfer is not None):
        raise ValueError("give text files, or --powerinfer FOLDER: one of the two")
    if options.powerinfer is not None and options.trace is not None:
        raise ValueError("--trace needs text: PowerInfer's folder holds counts, not tokens")
    profile = _from_powerinfer(options) if options.powerinfer is not None else _from_text(options)
    save_profile(options.out, profile)
    print("\n".join(summary(profile)))
    print(f"written: {options.out}" + (f", {options.trace}" if options.trace else ""))
    return 0


def _from_text(options: argparse.Namespace) -> Profile:
    source = open_checkpoint(options.model)
    config = source.config
    if not 8 <= options.window <= config.context_length:
        raise ValueError(
            f"--window {options.window}: this model takes windows of 8 to {config.context_length}"
        )
    if not 1 <= options.partners < config.num_neurons:
        raise ValueError(
            f"--partners {options.partners} must be 1 to {config.num_neurons - 1} for this model"
        )
    thresholds = resolve_thresholds(config, find_sparsity(source, options.sparsity))
    tokenizer = source.tokenizer()
    stream = TextStream(
        [Path(path) for path in options.text],
        lambda text: tokenizer.encode(text, add_bos=False),
        options.window,
        config.bos_id if config.add_bos else None,
    )
    total = stream.total_bytes()
    model = layered(load_decoder(source))
    trace = None if options.trace is None else TraceWriter(Path(options.trace))
    try:
        with tqdm(total=total, desc="profile", unit="B", unit_scale=True, file=sys.stderr) as bar:
            sums = measure_profile(
                model,
                thresholds,
                stream,
                batch=options.batch,
                sample_tokens=options.sample_tokens,
                trace=trace,
                tick=bar.update,
            )
        meta = _meta(options, source) | {
            "thresholds": [float(str(np.float32(value))) for value in thresholds],
            "tokens": sums.tokens,
            "window": options.window,
            "files": stream.files,
        }
        if trace is not None:
            trace.close(
                config.num_neurons, {key: meta[key] for key in ("model", "fingerprint", "files", "window")}
            )
    except BaseException:
        if trace is not None:
            trace.discard()
        raise
    return sums.profile(partners=options.partners, meta=meta)


def _from_powerinfer(options: argparse.Namespace) -> Profile:
    source = open_checkpoint(options.model)
    frequency, relative = read_activations(options.powerinfer)
    want = (source.config.num_layers, source.config.num_neurons)
    if frequency.shape != want:
        raise ValueError(
            f"{options.powerinfer} has {frequency.shape[0]} layers of {frequency.shape[1]} neurons, {options.model} "
            f"{want[0]} of {want[1]}: give the folder of this model"
        )
    thresholds = resolve_thresholds(source.config, find_sparsity(source, options.sparsity))
    facts = {"thresholds": [float(str(v)) for v in thresholds], "source": "powerinfer", "relative": relative}
    return Profile(frequency=frequency, meta=_meta(options, source) | facts)


def _meta(options: argparse.Namespace, source: Any) -> dict[str, Any]:
    return {
        "model": Path(options.model).name,
        "fingerprint": fingerprint(source),
        "num_layers": source.config.num_layers,
        "num_neurons": source.config.num_neurons,
        "activation": source.config.activation,
        "versions": installed_versions(),
    }


def show(path: str, extra: Sequence[str] = ()) -> int:
    """Print the summary of a profile.

    Raises:
        ValueError: no profile there, or arguments without effect.
    """
    from kairox_jax.io.profile import load_profile

    if extra:
        raise ValueError(f"--show prints a profile and runs nothing: leave out {' '.join(extra)}")
    print("\n".join(summary(load_profile(path))))
    return 0
