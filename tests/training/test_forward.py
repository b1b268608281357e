"""The layer-by-layer functions against the whole decoder, plain NumPy and JAX's own gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kairox_jax.models import Decoder
from training.forward import (
    Head,
    embed,
    histogram_layer,
    layered,
    loss_gradient,
    run_layer,
    sensitivity_layer,
)
from training.measure import evaluate, histograms, sensitivities
from training.statistics import bin_edges
from training.texts import Windows

THRESHOLDS = np.array([0.02, 0.1, 0.3], np.float32)


def ignore(work: int) -> None:
    assert work > 0


def reference(decoder: Decoder, ids: np.ndarray, thresholds: np.ndarray | None) -> tuple[np.ndarray, list]:
    """Losses [B, T-1] and each layer's (z before thresholds [B, T, F], FFN output), FFNs in float64."""
    x = decoder.embed[...][ids]
    values = []
    for layer, block in enumerate(decoder.blocks):
        x = x + block.attention(x, jnp.zeros(len(ids), jnp.int32))[0]
        h = np.asarray(block.ffn.normalise(x), np.float64)
        gate, up = (h @ np.asarray(w[...], np.float64).T for w in (block.ffn.w_gate, block.ffn.w_up))
        z = gate / (1 + np.exp(-gate)) * up
        if thresholds is None:
            kept = z
        else:
            over = np.abs(z) - thresholds[layer]
            kept = np.sign(z) * np.clip(3 * over, 0, np.abs(z))
        values.append(z)
        x = x + jnp.asarray(kept @ np.asarray(block.ffn.w_down[...], np.float64), jnp.float32)
    logits = np.asarray(decoder.logits(x), np.float64)[:, :-1]
    log_p = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_p -= logits.max(-1, keepdims=True)
    return -np.take_along_axis(log_p, ids[:, 1:, None], axis=-1)[..., 0], values


@pytest.mark.parametrize("thresholds", [None, THRESHOLDS])
def test_losses_and_active_counts(decoder: Decoder, windows: Windows, thresholds: np.ndarray | None) -> None:
    got = evaluate(layered(decoder), windows, thresholds, batch=2, tick=ignore)
    want, values = reference(decoder, windows.ids, thresholds)
    np.testing.assert_allclose(got.losses, want, rtol=2e-4, atol=2e-4)
    for kind in ("prose", "json"):
        rows = windows.rows(kind)
        assert got.tokens[kind] == len(rows) * 12
        for layer, z in enumerate(values):
            edge = -1 if thresholds is None else thresholds[layer]
            active = (np.abs(z[rows]) > edge).sum((0, 1))
            assert np.abs(got.active[kind][layer] - active).max() <= 1  # one tie in float32
    assert got.loss(windows, "json") == pytest.approx(want[2:].mean(), rel=1e-4)
    if thresholds is not None:
        plain = evaluate(layered(decoder), windows, None, batch=2, tick=ignore)
        assert np.abs(plain.losses - got.losses).max() > 0.01
        assert plain.active_frac("prose") == 1 > got.active_frac("prose") > 0
        each = [count / got.tokens[kind] for kind, count in got.active.items()]
        np.testing.assert_allclose(got.frequency(), (each[0] + each[1]) / 2)


def test_histogram_counts_every_value(decoder: Decoder, windows: Windows) -> None:
    got = histograms(layered(decoder), windows, batch=3, tick=ignore)
    _, values = reference(decoder, windows.ids, None)
    edges = bin_edges()
    for layer, z in enumerate(values):
        want, _ = np.histogram(np.clip(np.abs(z), edges[0], edges[-2]), edges)
        assert got[layer].sum() == want.sum() == z.size
        assert np.abs(np.cumsum(got[layer] - want)).max() <= 2  # float32 may cross a border


def test_histogram_passes_the_stream_on(decoder: Decoder, windows: Windows) -> None:
    model = layered(decoder)
    x = embed(model, windows.ids)
    got, _ = histogram_layer(model.graph, model.layers[0], x, jnp.float32(-1))
    want, _ = run_layer(model.graph, model.layers[0], x, jnp.float32(-1))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_loss(decoder: Decoder, windows: Windows) -> None:
    model = layered(decoder)
    ids = jnp.asarray(windows.ids)
    start = jnp.zeros(len(windows.ids), jnp.int32)

    def loss(x: jax.Array) -> jax.Array:
        for block in decoder.blocks:
            x, _ = block(x, start)
        log_p = jax.nn.log_softmax(decoder.logits(x)[:, :-1])
        return -jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1).sum()

    inputs = [embed(model, windows.ids)]
    for state in model.layers:
        inputs.append(run_layer(model.graph, state, inputs[-1], jnp.float32(-1))[0])
    grad = loss_gradient(decoder.config.norm_eps, model.head, inputs[-1], ids)
    for layer in (2, 1, 0):
        grad, _ = sensitivity_layer(
            model.graph, model.layers[layer], inputs[layer], grad, jnp.ones(1, jnp.float32), jnp.float32(-1)
        )
    want = jax.grad(loss)(inputs[0])
    np.testing.assert_allclose(grad, want, rtol=1e-3, atol=1e-3 * float(jnp.abs(want).max()))


def test_cost_is_the_squared_change_along_the_gradient(decoder: Decoder, windows: Windows) -> None:
    model, layer = layered(decoder), 2
    edges = np.tile(np.array([0.0, 0.05, 0.5, 1e9], np.float32), (3, 1))
    got = sensitivities(model, windows, edges, batch=2, tick=ignore)
    assert got.shape == (2, 3, 4)
    np.testing.assert_allclose(got[:, :, 0], 0)
    _, values = reference(decoder, windows.ids, None)
    x = embed(model, windows.ids)
    for state in model.layers:
        x, _ = run_layer(model.graph, state, x, jnp.float32(-1))
    grad = loss_gradient(decoder.config.norm_eps, model.head, x, jnp.asarray(windows.ids))
    down = np.asarray(decoder.blocks[layer].ffn.w_down[...], np.float64)  # type: ignore[union-attr]
    for j, edge in enumerate(edges[layer]):
        dropped = np.where(np.abs(values[layer]) <= edge, values[layer], 0) @ down
        change = 0.5 * np.square((dropped * np.asarray(grad, np.float64)).sum(-1))
        want = [change[windows.rows(kind)].mean() for kind in windows.present()]
        np.testing.assert_allclose(got[:, layer, j], want, rtol=1e-3, atol=1e-9)


def test_nan_is_refused(decoder: Decoder, windows: Windows) -> None:
    model = layered(decoder)
    broken = Head(model.head.norm, model.head.table.at[3, 3].set(jnp.nan))
    model = type(model)(model.config, model.graph, model.layers, model.embed, broken)
    with pytest.raises(ValueError, match=r"loss of window 0 \(prose\) is NaN or infinite"):
        evaluate(model, windows, None, batch=2, tick=ignore)
