"""The Flax predictor and the host's packed rows compute what NumPy does."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kairox_jax.host import HostPredictors
from kairox_jax.io.predictor_file import pack_rows
from kairox_jax.io.predictors import LayerPredictor, Predictors
from kairox_jax.models.predictor import Predictor, load_predictor

D, F, R = 64, 80, 32


@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("format", ["q8_0", "q4_0", "f16", "f32"])
def test_module_and_host_agree_with_numpy(
    rng: np.random.Generator, norm: str, biased: bool, rest: bool, format: str
) -> None:
    fc1_bias, bias = (rng.normal(size=n).astype(np.float32) if biased else None for n in (R, F))
    part = LayerPredictor(
        fc1=pack_rows(rng.normal(size=(R, D)), format),
        fc2=pack_rows(rng.normal(size=(F, R)), format),
        fc1_bias=fc1_bias,
        bias=bias,
        rest=pack_rows(rng.normal(size=(D, R)), format) if rest else None,
        rest_bias=rng.normal(size=D).astype(np.float32) if rest else None,
        threshold=0.3,
    )
    predictors = Predictors(layers=(part,), input="own", norm=norm)
    x = rng.normal(size=(3, D)).astype(np.float32) * 4
    want = predictors.predict(0, x)
    got = load_predictor(part, norm)(jnp.asarray(x)[None])[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    chosen, found = HostPredictors(predictors, batch=4)(0, x)
    clear = np.abs(want - np.float32(0.3)) > 1e-4 * np.abs(want).max()
    assert clear.mean() > 0.99 and 0.1 < chosen.mean() < 0.9
    np.testing.assert_array_equal(chosen[clear], want[clear] >= np.float32(0.3))
    other = load_predictor(part, norm).both(jnp.asarray(x))[1]
    assert (found is None) == (other is None) == (not rest)
    if found is not None and other is not None:
        estimate = predictors.estimate_rest(0, x)
        np.testing.assert_allclose(found, estimate, rtol=1e-4, atol=1e-4 * np.abs(estimate).max())
        np.testing.assert_allclose(other, estimate, rtol=1e-4, atol=1e-4 * np.abs(estimate).max())


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="norm 'layer' is not one of"):
        Predictor(D, R, F, norm="layer", rngs=nnx.Rngs(0))
