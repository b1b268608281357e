"""`kairox info`: what a model file holds, without reading its weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kairox_jax.commands.flags import Flag, add_flags
from kairox_jax.commands.options import DEFAULT_MODEL

FLAGS = (
    Flag(dest="json", names=("--json",), help="print one JSON object"),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "info",
        help="what a model file holds",
        description="Report a model's family, sizes, activation, tensors by type, context and licence.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help=f"a name for 'kairox pull', a GGUF file, or a Hugging Face repository (default {DEFAULT_MODEL})",
    )
    add_flags(parser, {"output": FLAGS})
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Print what the model holds; return 0."""
    del engine_api
    facts = collect(args.name)
    print(json.dumps(facts) if args.json else "\n".join(report(facts)))
    return 0


def collect(name: str) -> dict[str, Any]:
    """Read a model's facts.

    Args:
        name: whatever ``kairox_jax.io.resolve_model`` takes.

    Returns:
        The fields of ModelConfig, and ``name``, ``path``, ``licence``, ``num_bytes``, ``tensors`` (type ->
        count and bytes), ``chat_template`` and ``predictors`` (whether there are some), ``activation_source``
        (what decided the activation) and ``sparsity`` (None where none).
    """
    from kairox_jax.io import REGISTRY, open_checkpoint, shipped_sparsity
    from kairox_jax.io.gguf_file import GgufFile
    from kairox_jax.io.orbax_folder import OrbaxFolder, is_orbax_folder
    from kairox_jax.io.safetensors_file import SafetensorsFolder

    checkpoint = open_checkpoint(name)
    fields: Mapping[str, Any] = {}
    vocabulary = checkpoint.tokenizer_path
    if is_orbax_folder(checkpoint.path):
        sizes = [(place.format, place.num_bytes) for place in OrbaxFolder(checkpoint.path).places.values()]
        fields = GgufFile(vocabulary).fields if vocabulary is not None and vocabulary.is_file() else {}
    elif checkpoint.path.is_dir():
        folder = SafetensorsFolder(checkpoint.path)
        formats = [folder.raw(tensor) for tensor in folder.shapes]
        sizes = [(form, raw.nbytes) for raw, form in formats]
    else:
        file = GgufFile(checkpoint.path)
        fields = file.fields
        sizes = [(tensor.format, tensor.num_bytes) for tensor in file.tensors.values()]
    tensors: dict[str, dict[str, int]] = {}
    for form, num_bytes in sizes:
        of_type = tensors.setdefault(form, {"count": 0, "bytes": 0})
        of_type["count"] += 1
        of_type["bytes"] += num_bytes
    sparsity = checkpoint.own_sparsity() or shipped_sparsity(checkpoint)
    return {
        "name": fields.get("general.name"),
        "path": str(checkpoint.path),
        "licence": REGISTRY[name].licence if name in REGISTRY else fields.get("general.license"),
        "num_bytes": checkpoint.num_bytes,
        "tensors": tensors,
        "sparsity": None if sparsity is None else _outline(sparsity),
        "chat_template": checkpoint.chat_template is not None,
        "activation_source": checkpoint.activation_source,
        "predictors": checkpoint.sparse_threshold is not None,
        **asdict(checkpoint.config),
    }


def report(facts: dict[str, Any]) -> Iterable[str]:
    """Lay the facts out as lines."""
    activation = facts["activation"]
    if facts["activation_threshold"]:
        activation += f", threshold {facts['activation_threshold']:g}"
    heads = f"{facts['num_heads']} heads of {facts['head_dim']}, {facts['num_kv_heads']} for keys and values"
    tied = " (the output matrix is the embedding)" if facts["tie_embeddings"] else ""
    rows = {
        "name": facts["name"] or "not given",
        "file": facts["path"],
        "licence": facts["licence"] or "not given",
        "family": facts["family"],
        "layers": f"{facts['num_layers']} of width {facts['d_model']}",
        "ffn": f"{facts['num_neurons']} neurons a layer, {activation} (by {facts['activation_source']})",
        "predictors": "in the file (PowerInfer's)" if facts["predictors"] else "none in the file",
        "sparsity": _sparsity_line(facts),
        "attention": heads,
        "vocabulary": f"{facts['vocab_size']} tokens{tied}",
        "context": f"{facts['context_length']} tokens",
        "chat": "has a template" if facts["chat_template"] else "no template: generate only",
        "weights": f"{facts['num_bytes'] / 1e6:.1f} MB",
    }
    yield from (f"{name:<12}{value}" for name, value in rows.items())
    for name, of_type in sorted(facts["tensors"].items(), key=lambda item: -item[1]["bytes"]):
        yield f"{'':<12}{name:<6}{of_type['count']:>5} tensors {of_type['bytes'] / 1e6:>10.1f} MB"


def _outline(sparsity: Any) -> dict[str, Any]:
    """Thresholds' range, and the mean share of active neurons where there is a profile."""
    frequency = sparsity.frequency
    return {
        "least_threshold": float(sparsity.thresholds.min()),
        "largest_threshold": float(sparsity.thresholds.max()),
        "active_frac": None if frequency is None else float(frequency.mean()),
    }


def _sparsity_line(facts: dict[str, Any]) -> str:
    found = facts["sparsity"]
    if found is not None:
        active = found["active_frac"]
        share = "" if active is None else f"; {active:.0%} of the neurons active in calibration"
        return (
            f"thresholds shipped, {found['least_threshold']:.3g} to {found['largest_threshold']:.3g}{share}"
        )
    if facts["activation"] == "silu":
        return "no thresholds: use --mode dense, or make them with 'kairox sparsify'"
    return f"needs no thresholds: {facts['activation']} is exactly zero for inactive neurons"
