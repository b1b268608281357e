"""Loading: modes, thresholds and what is refused; the exact function against NumPy float64."""

from pathlib import Path

import numpy as np
import numpy_reference
import pytest
from flax import nnx

from kairox_jax import load_model
from kairox_jax.io import Checkpoint, Sparsity, fingerprint, open_checkpoint, save_sparsity
from kairox_jax.models import Decoder, Threshold, load_decoder, resolve_thresholds

MODELS = Path(__file__).parents[1] / "data/models"
SILU = MODELS / "llama3-rope"
CALL = nnx.jit(Decoder.__call__)


def thresholded_forward(
    checkpoint: Checkpoint, ids: np.ndarray, thresholds: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> tuple[np.ndarray, list[float]]:
    """The reference's logits with neurons of |silu(g) u| <= threshold left out, and their share by layer."""
    left_out: list[float] = []
    layer = iter(list(range(checkpoint.config.num_layers)) * len(ids))

    def ffn(config: object, w: dict[str, np.ndarray], x: np.ndarray, kept: np.ndarray) -> np.ndarray:
        gate = x @ w["w_gate"].T
        values = gate / (1 + np.exp(-gate)) * (x @ w["w_up"].T)
        threshold = thresholds[next(layer)]
        size = np.abs(values)
        left_out.append((size <= threshold).mean())
        # Just over the threshold a value counts in part.
        part = np.where(size < threshold * 1.5, np.maximum(size - threshold, 0) * 3, size)
        return np.copysign(part, values) * kept @ w["w_down"]

    monkeypatch.setattr(numpy_reference, "_ffn", ffn)
    return numpy_reference.forward(checkpoint, ids), left_out


@pytest.fixture
def thresholds() -> np.ndarray:
    num_layers = open_checkpoint(SILU).config.num_layers
    return np.geomspace(0.02, 0.2, num_layers).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, thresholds: np.ndarray) -> Path:
    checkpoint = open_checkpoint(SILU)
    meta = {"fingerprint": fingerprint(checkpoint), "num_neurons": checkpoint.config.num_neurons}
    save_sparsity(tmp_path / "sparsity", Sparsity(thresholds, None, meta))
    return tmp_path / "sparsity"


def test_exact_silu_is_the_thresholded_function(
    folder: Path, thresholds: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with np.load(SILU / "expected.npz") as file:
        ids, dense = file["input_ids"], file["logits"]
    want, left_out = thresholded_forward(open_checkpoint(SILU), ids, thresholds, monkeypatch)
    got = np.asarray(CALL(load_model(SILU, "exact", sparsity=folder), ids))
    assert all(0.01 < share < 0.99 for share in left_out)
    assert np.abs(got - want).max() <= 2e-4 * np.abs(want).max()
    assert np.abs(got - dense).max() > 1e-2 * np.abs(dense).max()


def test_thresholds_are_state_but_not_parameters(thresholds: np.ndarray) -> None:
    decoder = load_decoder(open_checkpoint(SILU), thresholds.tolist())
    _, params, kept = nnx.split(decoder, nnx.Param, Threshold)
    values = [variable.get_value() for _, variable in nnx.to_flat_state(kept)]
    assert sorted(float(value) for value in values) == thresholds.tolist()
    assert len(nnx.to_flat_state(params)) == 2 + 7 * len(thresholds) + (not decoder.config.tie_embeddings)


def test_fatrelu_takes_its_threshold_from_the_config() -> None:
    name = MODELS / "prosparse-llama"
    source = open_checkpoint(name)
    assert source.config.activation_threshold == 0.01
    np.testing.assert_array_equal(resolve_thresholds(source.config, None), np.float32(0.01))
    ids = np.arange(1, 12)[None]
    want = np.asarray(CALL(load_model(name), ids))
    named = CALL(load_decoder(source, resolve_thresholds(source.config, None).tolist()), ids)
    np.testing.assert_allclose(named, want, atol=1e-5 * np.abs(want).max())
    higher = CALL(load_decoder(source, [0.5] * source.config.num_layers), ids)
    assert np.abs(np.asarray(higher) - want).max() > 1e-3 * np.abs(want).max()


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode 'fast' is unknown: choose one of dense, exact"):
        load_model(SILU, "fast")


def test_silu_without_thresholds_is_refused() -> None:
    """With the names of this function's arguments, and those of the command line's flags."""
    with pytest.raises(ValueError, match="activation is SiLU.*use mode 'dense'.*or make thresholds") as error:
        load_model(SILU, "exact")
    said = str(error.value)
    assert "`kairox sparsify MODEL --out FOLDER` and give their folder as sparsity" in said
    assert "(--mode dense)" in said and "(--sparsity FOLDER)" in said and "\n" not in said


def test_sparsity_without_effect_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="no effect in mode 'dense'"):
        load_model(SILU, sparsity=folder)
    with pytest.raises(ValueError, match="no effect: activation 'relu' is zero by itself"):
        load_model(MODELS / "relu-llama", "exact", sparsity=folder)


def test_sparsity_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="not for this model|this model"):
        load_model(MODELS / "llama-old-keys", "exact", sparsity=folder)


def test_thresholds_that_do_not_fit_are_refused(thresholds: np.ndarray) -> None:
    with pytest.raises(ValueError, match="1 thresholds for"):
        load_decoder(open_checkpoint(SILU), thresholds[:1].tolist())
    relu = open_checkpoint(MODELS / "relu-llama")
    with pytest.raises(ValueError, match="activation 'relu' takes none"):
        load_decoder(relu, [0.1] * relu.config.num_layers)
    with pytest.raises(ValueError, match="they belong to another model"):
        resolve_thresholds(open_checkpoint(SILU).config, Sparsity(thresholds[:1], None))


def test_a_weight_of_another_shape_is_refused() -> None:
    checkpoint = open_checkpoint(MODELS / "relu-llama")

    class Short:
        config = checkpoint.config

        def tensor(self, name: str) -> np.ndarray:
            return checkpoint.tensor(name)[:-1] if name == "layers.1.w_up" else checkpoint.tensor(name)

    with pytest.raises(ValueError, match="FFN.w_up needs shape"):
        load_decoder(Short())
