"""Write a synthetic ReLU-LLaMA as a GGUF file: random weights, about 15 % of each layer's neurons active.

Its text means nothing; its shapes, bytes and sparsity are those of a model. llama.cpp reads it as a llama and computes
SiLU, which costs the same. For ``python -m benchmarks.bench_cpu_decode --model FILE``.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import gguf
import numpy as np
from jaxtyping import Int, UInt8
from tqdm import tqdm

from benchmarks.gpu.synthetic import ACTIVE_FRAC, BIAS_SPREAD, CONSTANT
from kairox_jax.io import open_checkpoint

BLOCK = 32
# Of a format: the standard deviation of uniform codes, the largest code, bytes of a block.
CODES = {"q8_0": (math.sqrt((255**2 - 1) / 12), 127, 34), "q4_0": (math.sqrt((15**2 - 1) / 12), 7, 18)}
# Mean threshold of a gate in standard deviations of its random part. More pass in later layers, where the random part
# of the stream has grown: 15 % on average (measured).
FIRST_PASS = 0.091
GATE_SHIFT = NormalDist().inv_cdf(1 - FIRST_PASS) * math.sqrt(1 + BIAS_SPREAD**2)
FFN_STD, ATTENTION_STD = 0.1, 0.01  # what a layer adds to the residual stream, whose random part has 1


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of a model; the defaults are TinyLlama-1.1B's."""

    num_layers: int = 22
    d_model: int = 2048
    num_neurons: int = 5632
    num_heads: int = 32
    num_kv_heads: int = 4


def pack(codes: Int[np.ndarray, "rows columns"], scale: float, name: str) -> UInt8[np.ndarray, "rows bytes"]:
    """Pack codes (int8, symmetric) with one scale as blocks of a GGUF format.

    Source: ggml's ``block_q8_0`` and ``block_q4_0``: a float16 scale, then 32 codes; q4_0 holds codes plus 8, the
    second half of the block in the high nibbles.
    """
    rows, columns = codes.shape
    blocks = codes.reshape(rows, columns // BLOCK, BLOCK)
    packed = np.empty((rows, columns // BLOCK, CODES[name][2]), np.uint8)
    packed[:, :, :2] = np.array([scale], np.float16).view(np.uint8)
    if name == "q8_0":
        packed[:, :, 2:] = blocks.view(np.uint8)
    else:
        nibbles = (blocks + 8).astype(np.uint8)
        packed[:, :, 2:] = nibbles[:, :, : BLOCK // 2] | (nibbles[:, :, BLOCK // 2 :] << 4)
    return packed.reshape(rows, -1)


class Weights:
    """Draws the tensors of a model; the same seed gives the same file."""

    def __init__(self, shapes: Shapes, quantisation: str, seed: int) -> None:
        self.shapes, self.format = shapes, quantisation
        self._std, self._largest, _ = CODES[quantisation]
        self._rng = np.random.default_rng(seed)

    def matrix(
        self, rows: int, columns: int, std: float, *, zero_rows: int = 0, first: np.ndarray | None = None
    ) -> UInt8[np.ndarray, "rows bytes"]:
        """Return a packed matrix of a standard deviation; ``first`` replaces its first columns, in codes."""
        codes = self._rng.integers(-self._largest, self._largest + 1, (rows, columns), np.int8)
        codes[:zero_rows] = 0
        if first is not None:
            codes[:, : first.shape[1]] = first
        return pack(codes, std / self._std, self.format)

    def gate_columns(self, std: float) -> Int[np.ndarray, "F constant"]:
        """Return codes that weigh the stream's constant part by each neuron's threshold."""
        d, count = self.shapes.d_model, self.shapes.num_neurons
        shifts = -self._rng.normal(GATE_SHIFT, BIAS_SPREAD, count)
        constant = math.sqrt(d / 2 / CONSTANT)  # after the norm, in each of its columns
        total = np.rint(shifts / constant / (std / self._std)).astype(np.int64)  # over all columns together
        share, rest = np.divmod(total, CONSTANT)
        codes = share[:, None] + (np.arange(CONSTANT) < rest[:, None])
        return codes.clip(-self._largest, self._largest).astype(np.int8)

    def layer(self) -> dict[str, UInt8[np.ndarray, "rows bytes"]]:
        """Return one layer's matrices by their name in the file."""
        s = self.shapes
        d, kv = s.d_model, s.d_model // s.num_heads * s.num_kv_heads
        gate_std = math.sqrt(2 / d)  # the random part of the normed stream has half of its power
        down_std = FFN_STD / math.sqrt(ACTIVE_FRAC * s.num_neurons)
        return {
            "attn_q": self.matrix(d, d, d**-0.5),
            "attn_k": self.matrix(kv, d, d**-0.5),
            "attn_v": self.matrix(kv, d, d**-0.5),
            "attn_output": self.matrix(d, d, ATTENTION_STD, zero_rows=CONSTANT),
            "ffn_gate": self.matrix(s.num_neurons, d, gate_std, first=self.gate_columns(gate_std)),
            "ffn_up": self.matrix(s.num_neurons, d, gate_std),
            "ffn_down": self.matrix(d, s.num_neurons, down_std, zero_rows=CONSTANT),
        }

    def embedding(self, vocab: int) -> UInt8[np.ndarray, "V bytes"]:
        """Return the token embeddings, always q8_0, whose first columns are constant; also the output matrix."""
        d, largest = self.shapes.d_model, CODES["q8_0"][1]
        scale = math.sqrt(d / CONSTANT) / largest  # the constant part has as much power as the random one
        codes = self._rng.normal(0, 1 / scale, (vocab, d)).round().clip(-largest, largest)
        codes[:, :CONSTANT] = largest
        return pack(codes.astype(np.int8), scale, "q8_0")


def write(path: Path, shapes: Shapes, quantisation: str, *, tokenizer_of: str, seed: int) -> None:
    """Write the file; the tokenizer is copied from another GGUF file."""
    source = gguf.GGUFReader(open_checkpoint(tokenizer_of).path)
    vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("synthetic relu-llama")
    writer.add_block_count(shapes.num_layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(shapes.d_model)
    writer.add_feed_forward_length(shapes.num_neurons)
    writer.add_head_count(shapes.num_heads)
    writer.add_head_count_kv(shapes.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    writer.add_string("kairox.activation", "relu")
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            kinds = field.types
            sub = kinds[1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub)
    weights, kind = Weights(shapes, quantisation, seed), gguf.GGMLQuantizationType[quantisation.upper()]
    ones = np.ones(shapes.d_model, np.float32)
    writer.add_tensor("token_embd.weight", weights.embedding(vocab), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", ones)
    for layer in tqdm(range(shapes.num_layers), desc=path.name, unit="layer", file=sys.stderr):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        for name, packed in weights.layer().items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.make_relu_llama",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="FILE.gguf", help="file to write")
    parser.add_argument("--format", choices=tuple(CODES), default="q8_0", help="default: %(default)s")
    parser.add_argument("--tokenizer", default="smollm2-135m", metavar="MODEL", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    for name, value in vars(Shapes()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, metavar="N", help="default: %(default)s"
        )
    args = parser.parse_args(argv)
    shapes = Shapes(**{name: getattr(args, name) for name in vars(Shapes())})
    try:
        write(args.out, shapes, args.format, tokenizer_of=args.tokenizer, seed=args.seed)
    except (ValueError, OSError) as error:
        print(f"make_relu_llama: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
