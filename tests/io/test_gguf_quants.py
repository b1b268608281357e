"""Five bit, six bit and K blocks: known bytes worked out by hand, the gguf library, and whole models."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from ggml_blocks import PACK
from numpy_reference import forward

from kairox_jax.io import open_checkpoint
from kairox_jax.io.weights import unpack

Types = gguf.GGMLQuantizationType
ONE, TWO = np.float16(1).tobytes(), np.float16(2).tobytes()


def known_block(name: str) -> tuple[bytes, dict[int, float]]:
    """Give a block of known bytes, and some of its weights."""
    if name == "Q5_0":
        # Weight 0: low nibble 3, fifth bit set: 19 - 16. Weight 17: high nibble of byte 1, bit 17 not set.
        return TWO + bytes([1, 0, 0, 0]) + bytes([0x03, 0xA0, *[0] * 14]), {
            0: 6.0,
            1: -32.0,
            17: -12.0,
            31: -32.0,
        }
    if name == "Q5_1":
        # Scale 2, minimum 1. Weight 16: high nibble 15 and bit 16: 31.
        return TWO + ONE + bytes([0, 0, 1, 0]) + bytes([0xF4, *[0] * 15]), {0: 9.0, 1: 1.0, 16: 63.0}
    if name == "Q4_K":
        # d 1, dmin 2. Part 0: scale 5, minimum 3. Part 5: scale 4 | 2 << 4 = 36, minimum 7 | 1 << 4 = 23.
        scales = [5, 2 << 6, 0, 0, 3, 1 << 6, 0, 0, 0, 4 | 7 << 4, 0, 0]
        # Byte 64 of the codes holds weight 128 (part 4, low nibble) and weight 160 (part 5, high nibble).
        codes = [0x09, *[0] * 63, 0xB0, *[0] * 63]
        return ONE + TWO + bytes(scales) + bytes(codes), {
            0: 9 * 5 - 6.0,
            1: -6.0,
            160: 11 * 36 - 46.0,
            161: -46.0,
        }
    low, high, scales = bytearray(128), bytearray(64), bytearray(16)
    # Weight 0: 5 | 1 << 4 = 21. Weight 98 (second 64, high nibble of byte 34, bits 6 and 7 of byte 2): 6 | 3 << 4.
    low[0], high[0], low[34], high[2] = 0x05, 0x01, 0x60, 0xC0
    # Weight 128 + 20: second half, first 32, second scale: code 7.
    low[64 + 20] = 0x07
    scales[0], scales[6], scales[9] = 2, 256 - 3, 1
    return bytes(low + high + scales) + TWO, {0: -11 * 2 * 2.0, 98: 22 * -3 * 2.0, 148: -25 * 2.0, 16: 0.0}


@pytest.mark.parametrize("name", PACK)
def test_known_bytes(name: str) -> None:
    block, weights = known_block(name)
    assert len(block) == gguf.GGML_QUANT_SIZES[Types[name]][1]
    got = unpack(np.frombuffer(block, np.uint8), name.lower())
    assert {i: float(got[i]) for i in weights} == weights


@pytest.mark.parametrize("name", PACK)
def test_as_the_library(name: str, rng: np.random.Generator) -> None:
    """Whatever the bytes; scales are kept finite."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[Types[name]]
    raw = rng.integers(0, 256, (5, 3 * num_bytes), dtype=np.uint8)
    blocks = raw.reshape(5, 3, num_bytes)
    halves = {"Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}[name]
    for at in halves:
        blocks[..., at : at + 2] = (
            rng.normal(size=(5, 3, 1)).astype(np.float16).view(np.uint8).reshape(5, 3, 2)
        )
    got = unpack(raw, name.lower())
    assert got.shape == (5, 3 * size) and got.dtype == np.float32
    np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, Types[name]))


@pytest.mark.parametrize("name", PACK)
def test_rows_that_were_packed(name: str, rng: np.random.Generator) -> None:
    """Packing and unpacking loses no more than half a step."""
    values = rng.normal(size=(4, 512)).astype(np.float32)
    got = unpack(PACK[name](values), name.lower())
    step = {"Q5_0": 1 / 15, "Q5_1": 2 / 31, "Q4_K": 2 / 15, "Q6_K": 1 / 31}[name] * abs(values).max()
    assert abs(got - values).max() < 0.75 * step


@pytest.mark.parametrize("name", [*PACK, "Q8_0"])
def test_a_model_near_its_original(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """All matrices packed: the logits' relative error is of the size of the weights'."""
    shapes = {"token_embd": (61, 256), "blk.0.attn_q": (256, 256), "blk.0.attn_k": (128, 256)}
    shapes |= {"blk.0.attn_v": (128, 256), "blk.0.attn_output": (256, 256), "blk.0.ffn_gate": (512, 256)}
    shapes |= {"blk.0.ffn_up": (512, 256), "blk.0.ffn_down": (256, 512)}
    matrices = {
        f"{key}.weight": rng.normal(size=shape).astype(np.float32) / 16 for key, shape in shapes.items()
    }
    norms = {
        f"{key}.weight": np.ones(256, np.float32)
        for key in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    }
    ids = rng.integers(0, 61, (1, 9))
    kinds = {key: Types[name] for key in matrices}
    plain = forward(open_checkpoint(write(tmp_path / "plain.gguf", matrices | norms, {})), ids)
    packed = forward(open_checkpoint(write(tmp_path / "packed.gguf", matrices | norms, kinds)), ids)
    error = np.linalg.norm(packed - plain) / np.linalg.norm(plain)
    pack = PACK.get(name, lambda rows: gguf.quants.quantize(rows, Types[name]))
    weight = matrices["blk.0.ffn_up.weight"]
    rounding = np.linalg.norm(unpack(pack(weight), name.lower()) - weight) / np.linalg.norm(weight)
    assert rounding < {"Q8_0": 0.01, "Q6_K": 0.025, "Q4_K": 0.09}.get(name, 0.06)
    assert rounding < error < 4 * rounding


def write(path: Path, tensors: dict[str, np.ndarray], kinds: dict[str, Types]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, values in tensors.items():
        kind = kinds.get(name, Types.F32)
        if kind == Types.F32:
            writer.add_tensor(name, values)
        else:
            pack = PACK.get(kind.name, lambda rows, kind=kind: gguf.quants.quantize(rows, kind))
            writer.add_tensor(name, pack(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
