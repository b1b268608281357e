"""What a model takes of the device's memory apart from slots: bytes from sizes and formats, no weight is read."""

from __future__ import annotations

from collections.abc import Sequence

from kairox_jax.config import ModelConfig
from kairox_jax.engine.host_prefill import MOST_TOKENS
from kairox_jax.engine.prefill import CHUNKS
from kairox_jax.engine.programs import cache_length
from kairox_jax.host import host_formats
from kairox_jax.placement import Needs, slot_bytes
from kairox_jax.placement.planner import FLOAT_BYTES
from kairox_jax.placement.store import RowSource
from kairox_jax.quant import FORMATS, RecordLayout, scales_bytes

# What a CUDA context and XLA's runtime keep of a card's memory before the first array.
RUNTIME_BYTES = 450_000_000
STREAMED_LAYERS = 2  # the prefill holds one layer's records and receives the next


def dense_weight_count(config: ModelConfig) -> int:
    """Return the number of weights outside the neurons; the neurons' own biases count as theirs."""
    dim, out = config.d_model, config.num_heads * config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    norm = (2 if config.norm == "layernorm" else 1) * dim
    biases = qkv * config.qkv_bias + dim * config.out_bias + dim * config.ffn_bias
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * dim
    if config.positions == "learned":
        tables += config.context_length * dim
    return tables + config.num_layers * ((qkv + out) * dim + 2 * norm + biases) + norm


def host_dense_bytes(source: RowSource) -> int:
    """Return the bytes of the weights outside the neurons as ``HostDense`` keeps them.

    Matrices stay in the file's rows where the host's kernels read those, all else is float32.
    """
    config = source.config
    dim, out = config.d_model, config.num_heads * config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    saved = _saved_bytes(source, ("embed",), config.vocab_size, dim)
    if not config.tie_embeddings:
        saved += _saved_bytes(source, ("output",), config.vocab_size, dim)
    for layer in range(config.num_layers):
        saved += _saved_bytes(source, [f"layers.{layer}.{name}" for name in ("wq", "wk", "wv")], qkv, dim)
        saved += _saved_bytes(source, (f"layers.{layer}.wo",), dim, out)
    return dense_weight_count(config) * FLOAT_BYTES - saved


def _saved_bytes(source: RowSource, names: Sequence[str], num_rows: int, num_elems: int) -> int:
    """Return what float32 would take more for matrices that are kept as one, of ``num_rows`` rows in all."""
    formats = {source.packed_format(name) for name in names}
    kept = formats.pop() if len(formats) == 1 else None
    if kept is None or kept not in host_formats():
        return 0
    return num_rows * (num_elems * FLOAT_BYTES - FORMATS[kept].row_bytes(num_elems))


def _host_activations(config: ModelConfig, parallel: int) -> int:
    """Return the bytes of the host's scratch for a piece of prompt, and of a step's logits."""
    dim, out = config.d_model, config.num_heads * config.head_dim
    qkv = out + 2 * config.num_kv_heads * config.head_dim
    # Residual stream, norm, attention's result; products of q, k and v, mixed heads, angles; inputs; values.
    floats = 3 * dim + qkv + out + config.head_dim + max(dim, out) + config.num_neurons
    return (MOST_TOKENS * floats + parallel * config.vocab_size) * FLOAT_BYTES


def _device_activations(
    config: ModelConfig, layouts: Sequence[RecordLayout], length: int, bias_bytes: int
) -> int:
    """Return the bytes of a piece of prompt on the device, and of what is streamed there for it."""
    record_bytes = max(layout.record_bytes for layout in layouts)
    # Packed records of two layers, and one of them unpacked; the prefill's biases stay, of all layers.
    unpacked = max(slot_bytes(layout, "float32") for layout in layouts)
    streamed = config.num_neurons * (STREAMED_LAYERS * record_bytes + unpacked)
    streamed += config.num_layers * config.num_neurons * bias_bytes
    wide = max(3 * config.num_neurons, 4 * config.d_model, config.num_heads * length)
    return streamed + CHUNKS[-1] * wide * FLOAT_BYTES


def estimate_needs(
    config: ModelConfig,
    layouts: Sequence[RecordLayout],
    *,
    slot_format: str,
    context_length: int,
    parallel: int,
    predictor_bytes: int,
    max_moves: int,
    on_accelerator: bool,
    host_dense_bytes: int | None = None,
) -> Needs:
    """Return the bytes of everything but slots.

    A slot counts as the mean over layers, which may keep other formats.

    Args:
        config: sizes of the model.
        layouts: of each layer's records.
        slot_format: "packed" or "float32".
        context_length: positions of a sequence.
        parallel: sequences, each with a cache of its own.
        predictor_bytes: of predicted mode.
        max_moves: the most promotions of a layer and step.
        on_accelerator: whether the device is something else than the CPU.
        host_dense_bytes: of the dense part where host kernels run it, whose prefill streams no layer; None where
            the device runs it, in float32.
    """
    length = cache_length(context_length)
    positions = config.num_layers * length * config.num_kv_heads * config.head_dim
    record_bytes = max(layout.record_bytes for layout in layouts)
    bias_bytes = (len(layouts[0].formats) - 1) * FLOAT_BYTES * config.ffn_bias
    if host_dense_bytes is None:
        dense_bytes = dense_weight_count(config) * FLOAT_BYTES
        activations = _device_activations(config, layouts, length, bias_bytes)
    else:
        dense_bytes, activations = host_dense_bytes, _host_activations(config, parallel)
    tables = sum(scales_bytes(layout.formats[-1], config.d_model, config.num_neurons) for layout in layouts)
    return Needs(
        dense_bytes=dense_bytes + tables,
        predictor_bytes=predictor_bytes
        if on_accelerator
        else 0,  # on a CPU device the host's kernels read them
        cache_bytes=2 * parallel * positions * FLOAT_BYTES,
        workspace_bytes=activations + 4 * max_moves * record_bytes,
        runtime_bytes=RUNTIME_BYTES if on_accelerator else 0,
        slot_bytes=-(-sum(slot_bytes(layout, slot_format) for layout in layouts) // len(layouts))
        + bias_bytes,
    )
