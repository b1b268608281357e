"""The differentiable layer: its forward is the evaluated predictor, its gradients are the straight-through ones."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kairox_jax.io import open_checkpoint
from kairox_jax.io.predictor_file import pack_rows
from kairox_jax.io.predictors import Predictors
from kairox_jax.models import Decoder, load_decoder, normalise
from training.evaluate import Mode, run_modes
from training.forward import Head, embed, layered
from training.predictor_data import block_parts
from training.predictor_distil import _fitted
from training.predictor_fit import Fitted
from training.predictor_student import (
    SOFTNESS,
    Scales,
    Weights,
    begin,
    divergence,
    rounded,
    stored,
    straight_through,
    student_layer,
)
from training.predictor_trainer import pack
from training.texts import Windows

D, F = 16, 40
MODELS = Path(__file__).parents[1] / "data/models"


def fitted_of(rng: np.random.Generator, rank: int, dim: int = D, neurons: int = F) -> Fitted:
    shapes = ((rank, dim), (rank,), (neurons, rank), (neurons,), (dim,))
    fc1, fc1_bias, fc2, bias, mean = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return Fitted(fc1 * 0.3, fc1_bias, fc2 * 0.3, bias, mean * 0.2, {"rank": rank})


def trained(
    rng: np.random.Generator, rank: int, padded: int, dim: int = D, neurons: int = F
) -> tuple[Weights, Scales, Fitted]:
    fitted = fitted_of(rng, rank, dim, neurons)
    w, s = begin(fitted, rng.uniform(0.5, 2, dim).astype(np.float32), 0.2, padded, 0.1)
    rest = jnp.asarray(rng.normal(size=(dim, padded)), jnp.float32)
    w = w._replace(rest=rest, rest_bias=jnp.ones(dim))
    return w, s, fitted


@pytest.mark.parametrize("width", [32, 96])
def test_rounds_as_the_file_does(rng: np.random.Generator, width: int) -> None:
    rows = rng.normal(size=(7, width)).astype(np.float32)
    rows[2, :32] = 0
    once = np.asarray(rounded(jnp.asarray(rows)))
    np.testing.assert_allclose(once, pack_rows(rows, "q4_0").dequantize(), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(rounded(jnp.asarray(once)), once)  # so that packing changes nothing
    gradient = jax.grad(lambda a: (rounded(a) * 3).sum())(jnp.asarray(rows))
    np.testing.assert_array_equal(gradient, np.full_like(rows, 3))


def test_beginning_is_the_predictor_alone(rng: np.random.Generator) -> None:
    fitted = fitted_of(rng, 32)
    x = rng.normal(size=(9, D)).astype(np.float32)
    want = np.maximum(x @ fitted.fc1.T + fitted.fc1_bias, 0) @ fitted.fc2.T + fitted.bias - 0.7
    w, s = begin(fitted, rng.uniform(0.5, 2, D).astype(np.float32), 0.7, 64, 0.3)
    own = stored(w, s, rounding=False)
    assert own.fc1.shape == (64, D) and not own.fc1[32:].any() and not own.rest.any()
    got = np.maximum(x @ np.asarray(own.fc1).T + np.asarray(own.fc1_bias), 0) @ np.asarray(own.fc2).T
    np.testing.assert_allclose(got + np.asarray(own.bias), want, rtol=1e-3, atol=1e-3)


def test_begins_with_a_given_estimate_of_the_rest(rng: np.random.Generator) -> None:
    rest, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((D, 32), (D,)))
    fitted = fitted_of(rng, 32)._replace(rest=rest, rest_bias=bias)
    w, s = begin(fitted, rng.uniform(0.5, 2, D).astype(np.float32), 0.7, 64, 0.3)
    own = stored(w, s, rounding=False)
    assert not np.asarray(own.rest)[:, 32:].any()
    np.testing.assert_allclose(np.asarray(own.rest)[:, :32], rest, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(own.rest_bias, bias, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tiny", "opt", "relu-falcon"]
)  # RMS norm; layer norm; parallel with layer norm
def test_forward_is_what_evaluation_runs(rng: np.random.Generator, decoder: Decoder, name: str) -> None:
    """Layers of different ranks, packed as the file packs them, against `kairox eval`'s own code."""
    if name != "tiny":
        decoder = load_decoder(open_checkpoint(MODELS / name))
    config, model = decoder.config, layered(decoder)
    dim, neurons, layers = config.d_model, config.num_neurons, config.num_layers
    ids = rng.integers(3, config.vocab_size, (5, 12)).astype(np.int32)
    windows = Windows(ids, ("prose",) * 5, ())
    ranks = [32, 64, 32][:layers]
    parts = [trained(rng, rank, 64, dim, neurons) for rank in ranks]
    x, dense, before, shares = embed(model, ids), embed(model, ids), None, []
    for state, (w, s, _) in zip(model.layers, parts, strict=True):
        x, before, share = student_layer(model.graph, state, w, s, x, before, rounding=True)
        dense = block_parts(nnx.merge(model.graph, state), dense)[2]
        shares.append(share)
    packed = tuple(pack(_fitted(w, s, fitted), 0.0) for w, s, fitted in parts)
    assert [layer.fc1.shape[0] for layer in packed] == ranks and packed[0].rest is not None
    predictors = Predictors(layers=packed, input="adjacent", norm="rms")
    modes = [Mode(name="dense", rule="dense"), Mode(name="p", rule="predicted", predictors=predictors)]
    _, want = run_modes(decoder, windows, modes, active_above=None, batch=5, tick=lambda n: None)
    touched = want.counts[:, 0] / (12 * neurons * layers)
    # float16 biases, and a score at the threshold may fall either way.
    np.testing.assert_allclose(np.mean(shares, axis=0), touched, atol=3 / (12 * neurons * layers))
    assert 0.1 < touched.mean() < 0.9
    y = normalise(dense, model.head.norm, model.head.bias, config.norm_eps)
    pair = (y.reshape(-1, dim), x.reshape(-1, dim))
    found = divergence(config.norm_eps, model.head, *pair, products="float32")
    got = np.asarray(found).reshape(5, 12)[:, :-1]
    assert np.abs(got - want.divergence).mean() < 0.02 * want.divergence.mean()


def test_a_gate_passes_the_sigmoids_gradient(rng: np.random.Generator, decoder: Decoder) -> None:
    model = layered(decoder)
    w, s, _ = trained(rng, 32, 32)
    x = jnp.asarray(rng.normal(size=(1, 3, D)), jnp.float32)
    run = partial(student_layer, model.graph, model.layers[0], s=s, x=x, before=None, rounding=False)
    gradient = jax.grad(lambda w: run(w)[2].sum())(w).bias
    block = nnx.merge(model.graph, model.layers[0])
    after = x + block.attention(x, jnp.zeros(1, jnp.int32))[0]
    own = jax.tree.map(lambda a: np.asarray(a, np.float64), stored(w, s, rounding=False))
    wide = np.asarray(after, np.float64)
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    score = np.maximum(wide @ own.fc1.T + own.fc1_bias, 0) @ own.fc2.T + own.bias
    open = 1 / (1 + np.exp(-score / SOFTNESS))
    np.testing.assert_allclose(gradient, (open * (1 - open)).sum((0, 1)) / SOFTNESS / (3 * F), rtol=1e-3)
    assert float(straight_through(jnp.float32(1), jnp.float32(0.3))) == 1


def test_divergence_is_kl_in_float64(rng: np.random.Generator) -> None:
    head = Head(
        jnp.asarray(rng.uniform(0.5, 2, D), jnp.float32), jnp.asarray(rng.normal(size=(50, D)), jnp.float32)
    )
    y, x = (rng.normal(size=(300, D)).astype(np.float32) for _ in range(2))  # more than one piece
    wide = x.astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(head.norm)
    p, q = (np.exp(a @ np.asarray(head.table, np.float64).T) for a in (y, wide))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    got = divergence(1e-5, head, jnp.asarray(y), jnp.asarray(x), products="float32")
    np.testing.assert_allclose(got, (p * np.log(p / q)).sum(-1), rtol=1e-3, atol=1e-4)
