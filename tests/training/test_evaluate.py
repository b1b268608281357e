"""Evaluation in every mode against NumPy float64 on a tiny model."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kairox_jax.io.predictor_file import pack_rows
from kairox_jax.io.predictors import LayerPredictor, Predictors
from kairox_jax.models import Decoder
from training.evaluate import Mode, run_modes
from training.evaluate_figures import RowSizes, bytes_per_token, figures_table, mode_figures
from training.texts import Windows

SIZES = RowSizes(row=64, rows=3, first_rows=2, neurons=40, layers=3)


def predictors_of(rng: np.random.Generator, input: str) -> Predictors:
    layers = tuple(
        LayerPredictor(
            fc1=pack_rows(rng.normal(size=(32, 16)), "f32"),
            fc2=pack_rows(rng.normal(size=(40, 32)), "f32"),
            bias=rng.normal(size=40).astype(np.float32),
            threshold=0.3,
            rest=pack_rows(0.1 * rng.normal(size=(16, 32)), "f32"),
            rest_bias=rng.normal(size=16).astype(np.float32),
        )
        for _ in range(3)
    )
    return Predictors(layers=layers, input=input, norm="rms")


def reference(decoder: Decoder, ids: np.ndarray, predictors: Predictors) -> tuple[np.ndarray, np.ndarray]:
    """Return logits under predicted masks, and [L, B, T, F] masks, by the module's own attention only."""
    start = jnp.zeros(len(ids), jnp.int32)
    x = np.asarray(decoder.embed_tokens(jnp.asarray(ids), start))
    before, masks = None, []
    for layer, block in enumerate(decoder.blocks):
        after = x + np.asarray(block.attention(jnp.asarray(x), start)[0])
        given = {"own": after, "layer_input": x, "adjacent": after if before is None else before}
        flat = given[predictors.input].reshape(-1, x.shape[-1])
        mask = predictors.predicted(layer, flat).reshape(*after.shape[:2], -1)
        wide = after.astype(np.float64)
        h = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(block.ffn.norm[...])
        gate, up = h @ np.asarray(block.ffn.w_gate[...]).T, h @ np.asarray(block.ffn.w_up[...]).T
        z = gate / (1 + np.exp(-gate)) * up
        rest = predictors.estimate_rest(layer, flat).reshape(after.shape)
        x = (after + (z * mask) @ np.asarray(block.ffn.w_down[...], np.float64) + rest).astype(np.float32)
        before = after
        masks.append(mask)
    return np.asarray(decoder.logits(jnp.asarray(x)), np.float64), np.stack(masks)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("input", ["adjacent", "own", "layer_input"])
def test_predicted_against_numpy(
    rng: np.random.Generator, decoder: Decoder, windows: Windows, input: str
) -> None:
    predictors = predictors_of(rng, input)
    modes = [Mode(name="dense", rule="dense"), Mode(name="p", rule="predicted", predictors=predictors)]
    dense, got = run_modes(
        decoder, windows, modes, active_above=np.full(3, 0.01), batch=2, tick=lambda n: None
    )
    logits, masks = reference(decoder, windows.ids, predictors)
    want = log_softmax(logits)[:, :-1]
    full = log_softmax(np.asarray(decoder(jnp.asarray(windows.ids)), np.float64))[:, :-1]
    nexts = windows.ids[:, 1:, None]
    for outcome, values in ((dense, full), (got, want)):
        losses = -np.take_along_axis(values, nexts, -1)[..., 0]
        np.testing.assert_allclose(outcome.losses, losses, rtol=1e-3, atol=1e-3)
    divergence = (np.exp(full) * (full - want)).sum(-1)
    np.testing.assert_allclose(got.divergence, divergence, rtol=2e-2, atol=2e-3)
    assert (got.agreement == (full.argmax(-1) == want.argmax(-1))).mean() > 0.95
    np.testing.assert_allclose(got.counts[:, 0], masks.sum((0, 2, 3)), rtol=2e-3)
    np.testing.assert_allclose(got.layers[:, 0], masks.sum((1, 2, 3)), rtol=2e-3)
    assert 0.1 < masks.mean() < 0.9
    assert (dense.divergence == 0).all() and (dense.counts[:, 0] == 3 * 12 * 40).all()


def test_other_choices(rng: np.random.Generator, decoder: Decoder, windows: Windows) -> None:
    modes = [
        Mode(name="dense", rule="dense"),
        Mode(name="exact", rule="active"),
        Mode(name="oracle", rule="oracle", share=0.4),
        Mode(name="random", rule="random", share=0.4),
    ]
    above = np.array([0.5, 2.0, 8.0])
    dense, exact, oracle, random = run_modes(
        decoder, windows, modes, active_above=above, batch=5, tick=lambda n: None
    )
    thresholded = Decoder(decoder.config, thresholds=list(above), rngs=__import__("flax").nnx.Rngs(0))
    for ours, theirs in zip(thresholded.blocks, decoder.blocks, strict=True):
        ours.attention = theirs.attention
        for name in ("norm", "w_gate", "w_up", "w_down"):
            setattr(ours.ffn, name, getattr(theirs.ffn, name))
    thresholded.embed, thresholded.out_norm = decoder.embed, decoder.out_norm
    values = log_softmax(np.asarray(thresholded(jnp.asarray(windows.ids)), np.float64))[:, :-1]
    want = -np.take_along_axis(values, windows.ids[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(exact.losses, want, rtol=1e-3, atol=1e-3)
    figures = [
        mode_figures(m, o, dense, windows, SIZES)
        for m, o in zip(modes, (dense, exact, oracle, random), strict=True)
    ]
    assert figures[1]["recall"] == figures[1]["precision"] == 1
    for found in figures[2:]:
        assert found["touched_frac"] == pytest.approx(0.4, abs=0.05)
    assert figures[2]["recall_by_contribution"] > figures[3]["recall_by_contribution"] + 0.1
    assert figures[3]["recall_by_contribution"] == pytest.approx(0.4, abs=0.05)
    assert set(figures[2]["by_kind"]) == {"prose", "json"}
    text = figures_table([(m.name, f) for m, f in zip(modes, figures, strict=True)])
    assert "oracle" in text and "json" in text


def test_bytes_of_a_token(rng: np.random.Generator) -> None:
    predictors = predictors_of(rng, "own")
    dense = 3 * 40 * 3 * 64
    assert bytes_per_token(Mode(name="d", rule="dense"), 1.0, SIZES) == dense
    assert bytes_per_token(Mode(name="e", rule="active"), 0.25, SIZES) == dense * (2 / 3 + 0.25 / 3)
    predicted = Mode(name="p", rule="predicted", predictors=predictors)
    each = (
        4 * 32 * 16 + 4 * 40 * 32 + 2 * 40 + 4 * 16 * 32 + 2 * 16
    )  # the last two: what stands in for the rest
    assert bytes_per_token(predicted, 0.5, SIZES) == dense / 2 + 3 * each


def test_refusals(decoder: Any, windows: Windows) -> None:
    def fails(message: str, *modes: Mode, above: np.ndarray | None = None) -> None:
        with pytest.raises(ValueError, match=message):
            run_modes(decoder, windows, modes, active_above=above, batch=2, tick=lambda n: None)

    dense = Mode(name="dense", rule="dense")
    fails("first mode must be dense", Mode(name="exact", rule="active"))
    fails("needs a SiLU model's thresholds", dense, Mode(name="exact", rule="active"))
    fails("needs predictors", dense, Mode(name="p", rule="predicted"))
