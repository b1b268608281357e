"""Prefill beside the host's kernels, where the JAX device is the CPU itself: nothing is padded, nothing is compiled.

Host kernels multiply by the matrices: they unpack each weight once for all tokens, whose number is free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from kairox_jax.engine.host_dense import HostDense
from kairox_jax.engine.prefill import Piece
from kairox_jax.host import LayerFfn, tiles

# Tokens of a piece: of one prompt, and of several together. Of a batch, others wait for it meanwhile, or decode a token
# in it: it is a short one then, for their readers wait.
MOST_TOKENS, MOST_IN_BATCH, MOST_TOGETHER, MOST_MIXED = 256, 128, 256, 64
GROUP = tiles.TOKENS  # tokens that are multiplied together; half of them, or fewer, cost half as much


class HostPrefill:
    """A ``Prefill`` whose kernels fill the cache.

    Args:
        dense: the dense part.
        ffns: of each layer.
    """

    def __init__(self, dense: HostDense, *, ffns: Sequence[LayerFfn]) -> None:
        self._dense, self._ffns = dense, ffns

    def share(self, left: Sequence[int], *, beside: int = 0) -> list[int]:
        """Cut long prompts into equal pieces, and fill a piece with the next prompts."""
        if beside:
            return self._mixed(left, MOST_MIXED - beside)
        most = MOST_TOKENS if self._dense.batch == 1 else MOST_IN_BATCH
        result, room = [], MOST_TOGETHER
        for length in left:
            equal = -(-length // -(-length // most))
            tokens = min(length, -(-equal // GROUP) * GROUP)
            result.append(tokens if tokens <= room else 0)
            room -= result[-1]
        return result

    @staticmethod
    def _mixed(left: Sequence[int], room: int) -> list[int]:
        """Take the first prompt, then the shortest; beside a long one the others have half of the room."""
        result = [0] * len(left)
        kept = room // 2 if left[0] > 2 * room else 0
        result[0] = min(left[0], room - kept)
        for index in sorted(range(1, len(left)), key=lambda index: left[index]):
            result[index] = min(left[index], room - sum(result))
        result[0] += min(left[0] - result[0], room - sum(result))
        return result

    def together(self, prompts: Sequence[Piece]) -> Float[np.ndarray, "n D"]:
        """Run the pieces one behind the other."""
        dense = self._dense
        ids = np.concatenate([piece.ids for piece in prompts])
        at = np.concatenate([piece.start + np.arange(len(piece.ids), dtype=np.int32) for piece in prompts])
        rows = np.concatenate([np.full(len(piece.ids), piece.row, np.int32) for piece in prompts])
        x = dense.embed(ids[:, None], at)[:, 0]
        for layer, ffn in enumerate(self._ffns):
            h = dense.prompt(layer, x, at, rows)
            if dense.down_biases is not None:
                x += dense.down_biases[layer]
            ffn.add_all(h, x)
        return x[np.cumsum([len(piece.ids) for piece in prompts]) - 1]
