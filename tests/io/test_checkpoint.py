"""Canonical weights against what was written, the gguf library, and the config's claims."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from kairox_jax.io import FormatError, open_checkpoint
from kairox_jax.quant import FORMATS

Types, Values = gguf.GGMLQuantizationType, gguf.GGUFValueType
GGUF_NAMES = {
    "attn_norm": "attn_norm",
    "wq": "attn_q",
    "wk": "attn_k",
    "wv": "attn_v",
    "wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "w_gate": "ffn_gate",
    "w_up": "ffn_up",
    "w_down": "ffn_down",
}


def test_config(write_llama: Callable[..., Path]) -> None:
    config = open_checkpoint(write_llama()).config
    assert (config.family, config.activation) == ("llama", "silu")
    assert (config.num_layers, config.d_model, config.num_neurons) == (2, 64, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.context_length, config.rope_theta) == (262, 128, 10000.0)
    assert config.norm_eps == pytest.approx(1e-5)
    assert (config.bos_id, config.eos_ids, config.add_bos) == (1, (2, 0), False)
    assert not config.tie_embeddings


def test_weights_are_those_written(write_llama: Callable[..., Path], tiny_weights: Callable) -> None:
    """In half-split rotary order, and the down matrix by neuron."""
    checkpoint, want = open_checkpoint(write_llama()), tiny_weights()
    assert len(checkpoint.names()) == len(want)
    np.testing.assert_array_equal(checkpoint.tensor("embed"), want["token_embd.weight"])
    np.testing.assert_array_equal(checkpoint.tensor("output"), want["output.weight"])
    np.testing.assert_array_equal(checkpoint.tensor("out_norm"), want["output_norm.weight"])
    for layer in range(2):
        for ours, theirs in GGUF_NAMES.items():
            expected = want[f"blk.{layer}.{theirs}.weight"]
            got = checkpoint.tensor(f"layers.{layer}.{ours}")
            np.testing.assert_array_equal(got, expected.T if ours == "w_down" else expected)
            assert got.dtype == np.float32 and got.flags.c_contiguous and got.flags.writeable


@pytest.mark.parametrize("fmt", [*FORMATS, "q5_0", "q5_1"])
def test_block_formats(fmt: str, write_llama: Callable[..., Path], tiny_weights: Callable) -> None:
    """Rows in each format, straight and permuted, packed and not, as the gguf library unpacks them."""
    kind = Types[fmt.upper()]
    names = ["blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"]
    checkpoint = open_checkpoint(write_llama(types=dict.fromkeys(names, kind)))
    for name, ours in zip(names, ("wq", "w_up", "w_down"), strict=True):
        written = tiny_weights()[name]
        want = gguf.quants.dequantize(gguf.quants.quantize(written, kind), kind).reshape(written.shape)
        got = checkpoint.tensor(f"layers.0.{ours}")
        np.testing.assert_array_equal(got, want.T if ours == "w_down" else want)
        packed = checkpoint.packed(f"layers.0.{ours}")
        kept = fmt in ("f32", "f16", "bf16") if ours == "w_down" else fmt in FORMATS
        want = want.T if ours == "w_down" else want
        assert checkpoint.packed_format(f"layers.0.{ours}") == (fmt if kept else None)
        assert checkpoint.shape(f"layers.0.{ours}") == want.shape
        if kept:
            assert packed is not None and packed.format == fmt and packed.shape == want.shape
            np.testing.assert_array_equal(packed.dequantize(), want)
            checkpoint.check_packed(f"layers.0.{ours}")
        else:
            assert packed is None
    straight = checkpoint.packed("layers.0.w_up")
    if straight is not None:
        assert not straight.data.flags.writeable and not straight.data.flags.owndata
    assert checkpoint.packed("out_norm") is None


def test_tied_without_an_output_matrix(write_llama: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(write_llama(tied=True))
    assert checkpoint.config.tie_embeddings
    assert not checkpoint.has("output") and checkpoint.has("embed")
    with pytest.raises(ValueError, match="has no weight 'output'"):
        checkpoint.tensor("output")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.weight"])
def test_refuses_weights_that_are_no_numbers(
    name: str, value: float, write_llama: Callable[..., Path], tiny_weights: Callable
) -> None:
    path = write_llama()
    weights = tiny_weights()[name]
    data = path.read_bytes()
    needle = weights.reshape(-1)[:1].tobytes()
    where = data.index(needle)
    path.write_bytes(data[:where] + np.float32(value).tobytes() + data[where + 4 :])
    checkpoint = open_checkpoint(path)
    ours = {theirs: ours for ours, theirs in GGUF_NAMES.items()}[name.split(".")[2]]
    with pytest.raises(FormatError, match=f"{name}: 1 of {weights.size} values are NaN or infinite"):
        checkpoint.tensor(f"layers.{name.split('.')[1]}.{ours}")


def test_large_finite_weights_are_read(write_llama: Callable[..., Path], tiny_weights: Callable) -> None:
    path = write_llama()
    needle = tiny_weights()["output_norm.weight"][:1].tobytes()
    path.write_bytes(path.read_bytes().replace(needle, np.float32(1e30).tobytes()))
    assert open_checkpoint(path).tensor("out_norm")[0] == np.float32(1e30)


@pytest.mark.parametrize(
    ("key", "value", "kind", "message"),
    [
        ("llama.block_count", 0, Values.UINT32, "llama.block_count: 0 with"),
        ("llama.block_count", 2**31, Values.UINT32, "llama.block_count: 2147483648 with"),
        ("llama.block_count", 3, Values.UINT32, "blk.2.attn_norm.weight: missing"),
        ("llama.block_count", "2", Values.STRING, "'2' where a value of type int"),
        ("llama.embedding_length", 32, Values.UINT32, r"shape \(262, 64\); the config asks for \(262, 32\)"),
        (
            "llama.feed_forward_length",
            128,
            Values.UINT32,
            r"shape \(96, 64\); the config asks for \(128, 64\)",
        ),
        ("llama.attention.head_count", 0, Values.UINT32, "llama.attention.head_count: 0"),
        ("llama.attention.head_count_kv", 3, Values.UINT32, "num_heads 4 is no multiple of num_kv_heads 3"),
        ("llama.rope.dimension_count", 8, Values.UINT32, "8 differs from the head size 16"),
        (
            "llama.attention.layer_norm_rms_epsilon",
            float("nan"),
            Values.FLOAT32,
            "norm_eps nan must be positive",
        ),
        ("llama.expert_count", 8, Values.UINT32, "llama.expert_count: 8 is not supported"),
        ("llama.rope.scaling.type", "yarn", Values.STRING, "'yarn' is not supported"),
        ("llama.attention.sliding_window", -1, Values.INT32, "sliding_window -1 must be above zero"),
        ("general.architecture", "mamba", Values.STRING, "'mamba' is not supported"),
        ("tokenizer.ggml.eos_token_id", 262, Values.UINT32, "262 is no id of the 262 tokens"),
    ],
)
def test_refuses_metadata(
    key: str, value: object, kind: gguf.GGUFValueType, message: str, write_llama: Callable[..., Path]
) -> None:
    path = write_llama(metadata={key: (value, kind)})
    with pytest.raises(FormatError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


def test_neutral_settings_are_accepted(write_llama: Callable[..., Path]) -> None:
    metadata = {
        "llama.expert_count": (0, Values.UINT32),
        "llama.rope.scaling.type": ("none", Values.STRING),
        "llama.rope.dimension_count": (16, Values.UINT32),
    }
    assert open_checkpoint(write_llama(metadata=metadata)).config.num_layers == 2


@pytest.mark.model
def test_default_model(default_model: Path) -> None:
    """Shapes, and one tensor of each kind against the gguf library."""
    checkpoint = open_checkpoint("smollm2-135m")
    config = checkpoint.config
    assert (config.num_layers, config.d_model, config.num_neurons, config.vocab_size) == (
        30,
        576,
        1536,
        49152,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope_theta) == (9, 3, 64, 100000.0)
    assert config.tie_embeddings and config.eos_ids == (2, 0) and not config.add_bos
    assert len(checkpoint.names()) == 2 + 30 * 9
    theirs = {t.name: t for t in gguf.GGUFReader(default_model).tensors}
    picked = {"layers.3.wv": "blk.3.attn_v", "layers.29.w_up": "blk.29.ffn_up"}
    for ours, name in picked.items():
        want = theirs[f"{name}.weight"]
        np.testing.assert_array_equal(
            checkpoint.tensor(ours), gguf.quants.dequantize(want.data, want.tensor_type)
        )
    down = theirs["blk.7.ffn_down.weight"]
    np.testing.assert_array_equal(
        checkpoint.tensor("layers.7.w_down"), gguf.quants.dequantize(down.data, down.tensor_type).T
    )
    embed, up = checkpoint.packed("embed"), checkpoint.packed("layers.0.w_up")
    assert embed is not None and (embed.format, embed.shape) == ("q8_0", (49152, 576))
    assert up is not None and (up.format, up.shape) == ("q4_1", (1536, 576))


@pytest.mark.model
def test_memory_of_a_large_matrix(default_model: Path) -> None:
    """Reading takes little more than the result; what was read from the file is given back."""
    checkpoint = open_checkpoint(default_model)
    tracemalloc.start()
    embed = checkpoint.tensor("embed")
    assert tracemalloc.get_traced_memory()[1] < 1.1 * embed.nbytes
    tracemalloc.stop()


def test_rows_stay_valid_after_release(write_llama: Callable[..., Path], tiny_weights: Callable) -> None:
    checkpoint = open_checkpoint(write_llama())
    packed = checkpoint.packed("embed")
    checkpoint.release()
    assert packed is not None
    np.testing.assert_array_equal(packed.dequantize(), tiny_weights()["token_embd.weight"])
