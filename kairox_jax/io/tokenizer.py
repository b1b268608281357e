"""Text to token ids and back, rebuilt from a checkpoint's vocabulary with the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Engine

END_OF_TURN = frozenset(
    "<|im_end|> <|eot_id|> <|eom_id|> <|end_of_text|> <|endoftext|> <|end|> <|end_of_turn|> "
    "<end_of_turn>".split()
)


class Tokenizer:
    """A checkpoint's tokenizer."""

    def __init__(
        self,
        engine: Engine,
        pieces: Sequence[bytes],
        *,
        special: frozenset[int],
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        add_bos: bool,
        strip_first_space: bool = False,
    ) -> None:
        """Wrap a ready engine.

        Args:
            engine: the library's tokenizer; parses special tokens in the text.
            pieces: the bytes that each token stands for; nothing for special tokens.
            special: ids of control tokens.
            bos_id: the token that begins a text, where the checkpoint names one.
            eos_ids: the tokens that end a text or a turn.
            add_bos: put ``bos_id`` first by default.
            strip_first_space: the space before a text's first word is the tokenizer's, not the text's.
        """
        self._engine = engine
        self._pieces = pieces
        self._special = special
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.add_bos = add_bos
        self._strip_first_space = strip_first_space

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._pieces)

    def save(self, path: str | Path) -> None:
        """Write the engine as a ``tokenizer.json``."""
        self._engine.save(str(path))

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Turn text into token ids; special tokens written in the text become their ids.

        Args:
            text: any text.
            add_bos: begin with ``bos_id``, unless the text already does; None does as the checkpoint says.

        Raises:
            ValueError: a BOS is asked for, but the checkpoint names none.
        """
        ids = self._engine.encode(text, add_special_tokens=False).ids
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos: this checkpoint names no BOS token; pass add_bos=False")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text: perhaps part of a character; b"" when special.

        Raises:
            ValueError: there is no such token.
        """
        if not 0 <= token_id < len(self._pieces):
            raise ValueError(f"token id {token_id} is not in [0, {len(self._pieces)})")
        return self._pieces[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Turn token ids into text; special tokens are left out, broken characters become U+FFFD."""
        text = b"".join(self.token_bytes(int(i)) for i in ids).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strip_first_space else text

    def token_text(self, token_id: int | None) -> str:
        """Return a token as the vocabulary writes it, such as ``<|im_end|>``; "" for None (no such token)."""
        return "" if token_id is None else self._engine.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        """Say whether the token is a control token, which stands for no text."""
        return token_id in self._special


@cache
def byte_alphabet() -> dict[str, int]:
    """Map each character of byte-level BPE to the byte it stands for.

    Source: ``bytes_to_unicode`` of GPT-2: printable bytes stand for themselves, the rest follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def byte_level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    """Turn a byte-level token into its bytes; a token outside the alphabet stands for its own text."""
    codes = [alphabet.get(char, -1) for char in token]
    return token.encode() if -1 in codes else bytes(codes)
