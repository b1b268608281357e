"""Thresholds and profile in a GGUF file's metadata: the keys ``kairox.thresholds``, ``frequency``, ``sparsity``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.sparsity import Sparsity


def sparsity_fields(sparsity: Sparsity) -> dict[str, Any]:
    """Return the metadata that ``own_sparsity`` reads."""
    fields: dict[str, Any] = {
        "kairox.thresholds": sparsity.thresholds,
        "kairox.sparsity": json.dumps(sparsity.meta, ensure_ascii=False),
    }
    if sparsity.frequency is not None:
        fields["kairox.frequency"] = sparsity.frequency.reshape(-1)
    return fields


def own_sparsity(file: GgufFile) -> Sparsity | None:
    """Return thresholds and profile from a file's ``kairox.*`` keys; None where it has none.

    Raises:
        ValueError: they are broken.
    """
    thresholds, frequency = file.fields.get("kairox.thresholds"), file.fields.get("kairox.frequency")
    if thresholds is None:
        return None
    try:
        meta = json.loads(file.fields.get("kairox.sparsity", "{}"))
        rows = None if frequency is None else np.asarray(frequency).reshape(len(thresholds), -1)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.path}: kairox.sparsity: {error}; convert the source again") from None
    return Sparsity(np.array(thresholds, np.float32), rows, meta)
