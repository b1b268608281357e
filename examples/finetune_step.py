"""Take a loaded model's NNX state out, do one step of training with optax, and show the loss before and after.

python examples/finetune_step.py
python examples/finetune_step.py --model my-model --text "A sentence to learn." --save out/step1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import kairox_jax

TEXT = "Neurons that keep firing are moved to the device; the others wait on the host until they are needed."


def loss_of(graph: Any, params: Any, rest: Any, ids: jax.Array) -> jax.Array:
    """Return the mean loss of each next token, in nats."""
    model = nnx.merge(graph, params, rest)
    logits = model(ids)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def train_step(model: nnx.Module, ids: jax.Array, learning_rate: float) -> tuple[Any, float, float]:
    """Return the trained parameters (an ``nnx.State``) and the loss before and after one step."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimiser = optax.sgd(learning_rate)

    @jax.jit
    def step(params: Any, rest: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda p: loss_of(graph, p, rest, ids))(params)
        updates, _ = optimiser.update(gradient, optimiser.init(params), params)
        return optax.apply_updates(params, updates), loss

    trained, before = step(params, rest, ids)
    after = loss_of(graph, trained, rest, ids)
    return trained, float(before), float(after)


def save_state(params: Any, folder: Path) -> None:
    """Save a state with Orbax, as any other."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), nnx.to_pure_dict(params))


def main() -> None:
    """Train one step and print both losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--save", type=Path, help="folder for the trained state")
    args = parser.parse_args()
    ids = jnp.asarray([kairox_jax.load_tokenizer(args.model).encode(args.text)])
    trained, before, after = train_step(kairox_jax.load_model(args.model), ids, args.learning_rate)
    print(f"loss before {before:.4f}, after one step {after:.4f} nats a token on {ids.shape[1]} tokens")
    if args.save:
        save_state(trained, args.save)
        print(f"state saved in {args.save}")


if __name__ == "__main__":
    main()
