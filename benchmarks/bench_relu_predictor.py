"""Predictors on a model that was ReLU from the start: train a tiny one on Python's own texts, then its predictors.

python -m benchmarks.bench_relu_predictor --out benchmarks/results/relu_predictor.json

The question: is recall by contribution at least 0.99 while at most twice the active share is predicted?
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Int
from tqdm import tqdm

from benchmarks.machine import cpu_model, git_revision
from kairox_jax.config import ModelConfig
from kairox_jax.models import Decoder
from training.predictor_trainer import Trainer
from training.sources import builtin_documents
from training.texts import SPLITS, Windows, cut_windows, split_of

CONFIG = ModelConfig(
    family="llama",
    num_layers=4,
    d_model=128,
    num_neurons=512,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=256,
    context_length=256,
    activation="relu",
    tie_embeddings=True,
)
TOKENS = 128  # of a window; a token is a byte


class Source:
    """The trained model as the trainer of predictors takes a checkpoint."""

    def __init__(self, decoder: Decoder) -> None:
        self.config, self.decoder = CONFIG, decoder

    def tensor(self, name: str) -> np.ndarray:
        """Return a weight by canonical name."""
        if name in ("embed", "out_norm"):
            return np.asarray(getattr(self.decoder, name)[...]).copy()
        _, layer, part = name.split(".")
        block = self.decoder.blocks[int(layer)]
        if part in ("attn_norm", "ffn_norm"):
            return np.asarray((block.attention if part == "attn_norm" else block.ffn).norm[...]).copy()
        if part in ("wq", "wk", "wv"):
            return np.split(np.asarray(block.attention.wqkv[...]), 3)[("wq", "wk", "wv").index(part)].copy()
        return np.asarray(getattr(block.attention if part == "wo" else block.ffn, part)[...]).copy()

    def packed(self, name: str) -> None:
        """Return None: weights are float32."""


def batches_of(text: bytes, batch: int, seed: int) -> Any:
    """Yield batches of byte windows, without end."""
    data, rng = np.frombuffer(text, np.uint8), np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - TOKENS, batch)
        yield np.stack([data[s : s + TOKENS] for s in starts]).astype(np.int32)


def train_model(
    text: bytes, *, steps: int, batch: int, rate: float, sparsity: float
) -> tuple[Decoder, list[float]]:
    """Train the tiny model with AdamW; return it and its losses, nats per byte.

    ``sparsity`` weighs the mean of |z|, so that fewer neurons are active, as in models made for it.
    """
    graph, state = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(0)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps, rate * 0.1)
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))

    def loss_of(state: Any, ids: Int[Array, "B T"]) -> tuple[Array, Array]:
        model = nnx.merge(graph, state)
        start = jnp.zeros(ids.shape[:1], jnp.int32)
        x, size = model.embed_tokens(ids, start), jnp.float32(0)
        for block in model.blocks:
            x = x + block.attention(x, start)[0]
            z, _ = block.ffn.values(block.ffn.normalise(x))
            size = size + jnp.abs(z).mean()
            x = x + z @ block.ffn.w_down[...]
        nexts = optax.softmax_cross_entropy_with_integer_labels(model.logits(x)[:, :-1], ids[:, 1:]).mean()
        return nexts + sparsity * size, nexts

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(state: Any, moments: Any, ids: Array) -> tuple[Any, Any, Array]:
        (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(state, ids)
        changes, moments = optimiser.update(grads, moments, state)
        return optax.apply_updates(state, changes), moments, loss

    moments, losses = optimiser.init(state), []
    source = batches_of(text, batch, 0)
    for _ in tqdm(range(steps), desc="model", unit="step"):
        state, moments, loss = update(state, moments, jnp.asarray(next(source)))
        losses.append(float(loss))
    return nnx.merge(graph, state), losses


def measure(decoder: Decoder, windows: dict[str, Windows], options: argparse.Namespace) -> dict[str, Any]:
    """Train predictors and return the figures on the test split."""
    with tempfile.TemporaryDirectory() as folder:
        settings = SimpleNamespace(
            out=Path(folder), work=None, windows=options.windows, held=options.held, window=TOKENS, batch=8,
            steps=options.fit_steps, fit_batch=512, rate=3e-3, every=100, patience=3, bytes=options.bytes, seed=0,
            share=None, recall=options.recall, max_loss=None,
            distil_steps=0, distil_batch=1, distil_rate=1e-3, distil_every=1, products="float32",
        )  # fmt: skip
        trainer = Trainer(Source(decoder), windows, settings)  # type: ignore[arg-type]
        predictors, _, _ = trainer.run()
        return trainer.test(predictors)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600, help="of the model (default 600)")
    parser.add_argument("--fit-steps", type=int, default=600, help="of each predictor (default 600)")
    parser.add_argument("--sparsity", type=float, default=0.1, help="weight of the mean |z| (default 0.1)")
    parser.add_argument(
        "--windows", type=int, default=100, help="training windows of each kind (default 100)"
    )
    parser.add_argument("--held", type=int, default=20, help="held-out windows of each kind (default 20)")
    parser.add_argument("--bytes", type=float, default=0.06, help="share of the FFN's bytes (default 0.06)")
    parser.add_argument("--recall", type=float, default=0.993, help="asked on held-out text (default 0.993)")
    options = parser.parse_args(arguments)
    documents = builtin_documents()

    def encode(text: str) -> list[int]:
        return list(text.encode("ascii", "replace"))

    windows = {
        split: cut_windows(
            documents,
            encode,
            split,
            per_kind=options.windows if split == "calibration" else options.held,
            tokens=TOKENS,
        )
        for split in SPLITS
    }
    seen = [bytes(encode(d.text)) for d in documents if split_of(d.group) == "calibration"]
    text = b"\n".join(seen)[: 8 << 20]
    decoder, losses = train_model(text, steps=options.steps, batch=16, rate=2e-3, sparsity=options.sparsity)
    found = measure(decoder, windows, options)
    figures = found["modes"]["predicted"]
    ratio = figures["predicted_frac"] / figures["active_frac"]
    result = {
        "question": "recall by contribution >= 0.99 at a predicted share of at most twice the active share",
        "met": bool(figures["recall_by_contribution"] >= 0.99 and ratio <= 2),
        "predicted_over_active": round(ratio, 4),
        "model_loss_first": round(losses[0], 4),
        "model_loss_last": round(float(np.mean(losses[-20:])), 4),
        **found,
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "cpu": cpu_model(),
        "git": git_revision(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {key: result[key] for key in ("met", "predicted_over_active", "model_loss_last")} | figures
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
