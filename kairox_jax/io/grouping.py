"""Which neurons travel and are stored together: a permutation of each layer's neurons, in groups of one size."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

REMEDY = "make it again with `kairox group`"


@dataclass(frozen=True, eq=False, kw_only=True)
class Grouping:
    """Groups of the neurons of every layer.

    Attributes:
        permutation: group g of layer l is ``permutation[l, g * size : (g + 1) * size]``, hottest first [L, F].
        group_size: neurons of a group; divides F.
        meta: model, fingerprint where known, cohesion of each layer, command.
    """

    permutation: Int32[np.ndarray, "L F"]
    group_size: int
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = np.asarray(self.permutation, np.int32)
        object.__setattr__(self, "permutation", order)
        if order.ndim != 2 or not order.size:
            raise ValueError(
                f"the permutation has shape {list(order.shape)}, not layers by neurons: {REMEDY}"
            )
        check_group_size(self.group_size, order.shape[1])
        wrong = (np.sort(order, axis=1) != np.arange(order.shape[1])).any(axis=1)
        if wrong.any():
            raise ValueError(f"layer {int(np.argmax(wrong))} does not hold every neuron once: {REMEDY}")


def check_group_size(size: int, num_neurons: int) -> None:
    """Raise ``ValueError`` for a size that does not cut a layer's neurons into groups of two or more."""
    if not 2 <= size <= num_neurons or num_neurons % size:
        near = [n for n in range(2, min(num_neurons, 129)) if num_neurons % n == 0]
        raise ValueError(
            f"--group-size {size} does not divide the {num_neurons} neurons of a layer: take one of "
            f"{', '.join(map(str, near)) or num_neurons}"
        )


def save_grouping(path: str | Path, grouping: Grouping) -> None:
    """Write a grouping as .npz."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            permutation=grouping.permutation,
            group_size=np.int64(grouping.group_size),
            meta=np.array(json.dumps(grouping.meta)),
        )


def load_grouping(path: str | Path) -> Grouping:
    """Read a grouping.

    Raises:
        ValueError: unreadable, no grouping, or no permutation.
    """
    try:
        with np.load(io.BytesIO(Path(path).read_bytes()), allow_pickle=False) as file:
            permutation, size = file["permutation"], int(file["group_size"])
            meta = json.loads(str(file["meta"]))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; {REMEDY}") from None
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path} is no grouping: {REMEDY}") from None
    if permutation.dtype.kind not in "iu" or not isinstance(meta, dict):
        raise ValueError(f"{path} is no grouping: {REMEDY}")
    return Grouping(permutation=permutation, group_size=size, meta=meta)
