"""The rows of the key/value cache: what each holds, who uses it, and which suits a new prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Positions. A shorter beginning saves next to nothing, since tokens are multiplied by groups; and on an accelerator a
# prompt that is cut elsewhere gets other roundings, which none should get for a first word that it shares.
WORTH_REUSING = 8
WORTH_COPYING = 16  # more than the row has itself; fewer are computed as fast as a row is copied


@dataclass(frozen=True)
class Lease:
    """A row that a sequence may use.

    Attributes:
        row: its number.
        start: positions that are in it already; the first to compute.
        copy_from: the row whose first ``start`` positions must be copied into it before, or None.
    """

    row: int
    start: int
    copy_from: int | None = None


class CacheRows:
    """Which tokens each row holds.

    Args:
        num_rows: B.
    """

    def __init__(self, num_rows: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self._busy = [False] * num_rows
        self._last_use = [0] * num_rows
        self._uses = 0

    @property
    def num_free(self) -> int:
        """Rows that no sequence uses."""
        return self._busy.count(False)

    def take(self, prompt: Sequence[int], *, reuse: bool) -> Lease:
        """Give a prompt the free row that saves it the most work.

        The last token is always computed anew, because its logits are wanted.

        Args:
            prompt: token ids.
            reuse: begin with what the cache holds of this prompt, in this row or in another.

        Raises:
            ValueError: no row is free.
        """
        free = [row for row, busy in enumerate(self._busy) if not busy]
        if not free:
            raise ValueError("every row of the cache is in use: wait for a sequence to end")
        common = [_worth(_common(tokens, prompt), prompt) if reuse else 0 for tokens in self._tokens]
        row = max(free, key=lambda each: (common[each], -self._last_use[each]))
        best = max(range(len(common)), key=lambda each: common[each])
        lease = Lease(row, common[row])
        if common[best] >= common[row] + WORTH_COPYING:
            row = min(free, key=lambda each: self._last_use[each])
            lease = Lease(row, common[best], None if row == best else best)
        self._busy[lease.row] = True
        self._tokens[lease.row] = list(prompt[: lease.start])
        self._touch(lease.row)
        return lease

    def put(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Note that positions from ``start`` on now hold these tokens, and nothing after them counts."""
        self._tokens[row] = [*self._tokens[row][:start], *tokens]

    def forget(self, row: int, start: int) -> None:
        """Note that nothing from ``start`` on counts (a step that was interrupted)."""
        self._tokens[row] = self._tokens[row][:start]

    def free(self, row: int) -> None:
        """Give a row back; its tokens stay for prompts that begin alike."""
        self._busy[row] = False
        self._touch(row)

    def _touch(self, row: int) -> None:
        self._uses += 1
        self._last_use[row] = self._uses


def _worth(same: int, prompt: Sequence[int]) -> int:
    """Return how much of a common beginning is used: all of a short prompt, or none of it."""
    return same if same >= min(WORTH_REUSING, len(prompt) - 1) else 0


def _common(old: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many first tokens agree, without the prompt's last one."""
    same = 0
    for held, wanted in zip(old, prompt[:-1], strict=False):
        if held != wanted:
            break
        same += 1
    return same
