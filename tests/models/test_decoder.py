"""The module as Flax users meet it: jit, state taken out, saved and put on a mesh, a step of training."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from kairox_jax import load_model
from kairox_jax.models import Decoder, empty_cache

MODELS = Path(__file__).parents[1] / "data/models"
VARIED = ["opt", "relu-falcon", "sparse-qwen2"]


def case(name: str) -> tuple[Decoder, np.ndarray, np.ndarray]:
    with np.load(MODELS / name / "expected.npz") as file:
        return load_model(MODELS / name), file["input_ids"], file["logits"]


@pytest.mark.parametrize("name", VARIED)
def test_one_compiled_call_serves_other_weights(name: str) -> None:
    model, ids, want = case(name)
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, ids: nnx.merge(graph, state)(ids))
    np.testing.assert_allclose(run(state, ids), want, atol=2e-4 * np.abs(want).max())
    assert not np.asarray(run(jax.tree.map(jnp.zeros_like, state), ids)).any()
    np.testing.assert_allclose(nnx.jit(model)(ids), want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", VARIED)
def test_state_can_be_saved_and_sharded(name: str, tmp_path: Path) -> None:
    model, ids, want = case(name)
    arrays = {
        "/".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model))
    }
    np.savez(tmp_path / "state.npz", **arrays)
    blank = nnx.eval_shape(lambda: Decoder(model.config, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(blank)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with np.load(tmp_path / "state.npz") as file:
        filled = [
            (path, v.replace(jax.device_put(file["/".join(map(str, path))], sharding)))
            for path, v in nnx.to_flat_state(shapes)
        ]
    again = nnx.merge(graph, nnx.from_flat_state(filled))
    assert again.embed.get_value().sharding == sharding
    np.testing.assert_allclose(nnx.jit(again)(ids), want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", [*VARIED, "prosparse-llama"])
def test_a_step_of_training_lowers_the_loss(name: str) -> None:
    model, ids, _ = case(name)
    ids = jnp.asarray(ids)

    def loss_of(model: Decoder) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(ids)[:, :-1], ids[:, 1:]).mean()

    @nnx.jit
    def step(model: Decoder, optimizer: nnx.Optimizer) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = step(model, optimizer)
    assert 0 < float(loss_of(model)) < float(before)


def test_every_parameter_of_the_config_gets_a_gradient() -> None:
    """A parameter that nothing reads would have none."""
    for name in VARIED:
        model, ids, _ = case(name)
        weight = jnp.asarray(np.random.default_rng(0).normal(size=(*ids.shape, model.config.vocab_size)))

        def total(model: Decoder, ids: np.ndarray = ids, weight: jax.Array = weight) -> jax.Array:
            return (model(ids) * weight).sum()

        for path, grad in nnx.to_flat_state(nnx.jit(nnx.grad(total))(model)):
            assert np.abs(grad.get_value()).max() > 0, (name, path)


def test_wrong_ids_are_refused() -> None:
    model, ids, _ = case("opt")
    with pytest.raises(ValueError, match=r"shape \(.*\): expected \[batch, tokens\]"):
        model(ids[0])
    with pytest.raises(TypeError, match="float32: expected whole numbers"):
        model(ids.astype(np.float32))
    for wrong in (-1, model.config.vocab_size):
        with pytest.raises(ValueError, match=f"token id {wrong} is not in the vocabulary"):
            model(np.array([[1, wrong]]))
    long = np.ones((1, model.config.context_length + 1), np.int32)
    with pytest.raises(ValueError, match="this model takes at most"):
        model(long)
    cache = empty_cache(model.config, batch=1, length=4)
    with pytest.raises(ValueError, match="1 caches for"):
        model.extend(jnp.ones((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), [cache])


def test_a_llama_gets_no_operation_of_other_families() -> None:
    """The graph of an RMS-normed, gated model without biases holds one addition for each that it needs."""
    model, ids, _ = case("relu-llama")
    graph, state = nnx.split(model.blocks[0])
    x = jnp.zeros((1, 4, model.config.d_model))
    text = str(jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x, jnp.zeros(1, jnp.int32))[0])(state, x))
    adds = text.count("= add ")
    # eps twice, positions, rotation of q and k once each, two residuals.
    assert adds == 7, text
