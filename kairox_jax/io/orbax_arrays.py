"""Arrays in Orbax checkpoints: saved a part at a time, restored one by one, on the host or onto a mesh.

Orbax takes half a second to import, so it is imported where a checkpoint is written or read.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairox_jax.io.errors import FormatError

if TYPE_CHECKING:
    import jax

    ShardingOf = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]

REMEDY = "the checkpoint is damaged: convert its source again with --force"


def load_orbax() -> Any:
    """Import Orbax.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError:
        raise ValueError(
            "Orbax folders need the package orbax-checkpoint: `pip install orbax-checkpoint`"
        ) from None
    return orbax.checkpoint


def save_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as one Orbax checkpoint, which appears under its name only when it is whole.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    ocp = load_orbax()
    # Uncompressed: weights hardly shrink, and zstd would write at a third of the disk's speed.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(dict(arrays)))
    except Exception as error:  # TensorStore reports the system's errors as ValueError
        if "No space left" in str(error):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder)) from error
        raise


def restore_arrays(
    folder: Path, names: Sequence[str], sharding_of: ShardingOf | None = None
) -> dict[str, Any]:
    """Read some arrays of an Orbax checkpoint; the others are not touched.

    Args:
        folder: of the checkpoint.
        names: keys of its arrays.
        sharding_of: gives each array's sharding by name and shape; each device then reads its own part.
            None gives NumPy arrays.

    Returns:
        The arrays, ``jax.Array`` or NumPy.

    Raises:
        ValueError: a sharding does not divide its array.
        FormatError: the checkpoint is not there or damaged.
    """
    ocp = load_orbax()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            how = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
            if sharding_of is not None:
                stored = checkpointer.metadata(folder.absolute()).item_metadata.tree
                shapes = {name: tuple(stored[name].shape) for name in names}
                how = {
                    name: ocp.ArrayRestoreArgs(sharding=_fitting(sharding_of(name, shape), name, shape))
                    for name, shape in shapes.items()
                }
            args = ocp.args.PyTreeRestore(
                item=dict.fromkeys(names, 0), restore_args=how, partial_restore=True
            )
            return checkpointer.restore(folder.absolute(), args=args)
    except _ShardingError as error:
        raise ValueError(str(error)) from None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FormatError(
            folder, ", ".join(names)[:80], f"cannot be restored ({reason}): {REMEDY}"
        ) from error


class _ShardingError(Exception):
    """The caller's sharding does not fit an array."""


def _fitting(sharding: Any, name: str, shape: tuple[int, ...]) -> Any:
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        raise _ShardingError(f"{name} {list(shape)} cannot be sharded like that: {error}") from None
    return sharding
