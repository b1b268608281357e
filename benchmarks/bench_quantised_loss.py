"""Measure what --quantize costs: the default model's loss on held-out text, from its file and from conversions of it.

    python -m benchmarks.bench_quantised_loss --out benchmarks/results/quantised_loss.json

The text is the test split that the thresholds were never tuned on; every model sees the same windows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from benchmarks import machine
from kairox_jax.io import Checkpoint, open_checkpoint
from kairox_jax.io.convert import Conversion, convert
from kairox_jax.models import load_decoder
from training.forward import KEEP_ALL, embed, layered, run_layer, token_losses
from training.sources import builtin_documents
from training.texts import Windows, cut_windows, summary

GOAL_NATS = 0.01  # for q8_0
FORMATS = ("q8_0", "q4_0")


def main() -> None:
    """Convert, measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=8, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=256, help="of a window")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    source = open_checkpoint(args.model)
    tokenizer = source.tokenizer()
    windows = cut_windows(
        builtin_documents(),
        lambda text: tokenizer.encode(text, add_bos=False),
        "test",
        per_kind=args.windows,
        tokens=args.tokens,
    )
    text = json.dumps(measure(source, windows), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def measure(source: Checkpoint, windows: Windows) -> dict[str, Any]:
    """Return losses of the source and of each conversion, and their differences token by token."""
    losses = {"source": token_loss(source, windows.ids)}
    sizes = {"source": source.num_bytes}
    for fmt in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            job = Conversion(source=source, target=Path(folder, "model"), quantize=fmt)
            convert(job, note=print, report=lambda written, total: None)
            converted = open_checkpoint(job.target)
            losses[fmt], sizes[fmt] = token_loss(converted, windows.ids), converted.num_bytes
    return {
        "model": source.path.name,
        "bytes": sizes,
        "loss_nats": {name: float(values.mean()) for name, values in losses.items()},
        "loss_nats_by_kind": {
            name: {kind: float(values[windows.rows(kind)].mean()) for kind in windows.present()}
            for name, values in losses.items()
        },
        "over_source_nats": {fmt: _difference(losses[fmt] - losses["source"]) for fmt in FORMATS},
        "goal_q8_0_nats": GOAL_NATS,
        "text": summary(windows),
        "machine": machine.facts(),
    }


def token_loss(checkpoint: Checkpoint, ids: Int[np.ndarray, "W T"]) -> Float[np.ndarray, "W T1"]:
    """Return the dense model's loss of each next token, in nats, one window at a time."""
    model = layered(load_decoder(checkpoint))
    rows = []
    for row in ids:
        x = embed(model, row[None])
        for state in model.layers:
            x, _ = run_layer(model.graph, state, x, jnp.float32(KEEP_ALL))
        rows.append(np.asarray(token_losses(model.config.norm_eps, model.head, x, jnp.asarray(row[None])))[0])
    return np.stack(rows)


def _difference(values: Float[np.ndarray, "W T1"]) -> dict[str, float]:
    """Return the mean and its standard error over windows, which are independent where tokens are not."""
    means = values.mean(axis=1)
    return {"mean": float(means.mean()), "standard_error": float(means.std(ddof=1) / np.sqrt(len(means)))}


if __name__ == "__main__":
    main()
