"""A model's files behind one face: config, canonical weights one at a time, tokenizer, chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float

from kairox_jax.config import ModelConfig
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_model import gguf_config, gguf_entries
from kairox_jax.io.hf_config import hf_config
from kairox_jax.io.hf_model import hf_entries
from kairox_jax.io.hf_tokenizer import adds_bos, hf_chat_template, hf_tokenizer
from kairox_jax.io.registry import resolve_model
from kairox_jax.io.safetensors_file import SafetensorsFolder
from kairox_jax.io.tokenizer import Tokenizer, gguf_tokenizer
from kairox_jax.io.weights import Entry, TensorFile, check_entries, check_packed, pack_entry, read_entry
from kairox_jax.quant import PackedRows


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened model; weights are read when asked for.

    Canonical names and shapes (row-major; q and k rows in half-split rotary order, as in Hugging Face):
    ``embed`` [V, D], ``out_norm`` [D], ``output`` [V, D] (absent when tied), and per layer
    ``layers.{l}.`` + ``attn_norm`` [D], ``wq`` [N*H, D], ``wk``, ``wv`` [K*H, D], ``wo`` [D, N*H],
    ``ffn_norm`` [D], ``w_gate``, ``w_up``, ``w_down`` [F, D] (row i of each belongs to neuron i).
    Where the config says so: ``bq`` [N*H], ``bk``, ``bv`` [K*H], ``bo`` [D], ``b_up`` [F], ``b_down`` [D],
    ``attn_norm_bias``, ``ffn_norm_bias``, ``out_norm_bias`` [D], ``pos_embed`` [P, D] (row p is position p).

    Attributes:
        path: the file or folder.
        config: the model's facts.
        chat_template: Jinja2 text, or None where the checkpoint has none.
        num_bytes: bytes of all weights in the file.
    """

    path: Path
    config: ModelConfig
    chat_template: str | None
    num_bytes: int
    _file: TensorFile = field(repr=False)
    _entries: Mapping[str, Entry] = field(repr=False)
    _load_tokenizer: Callable[[], Tokenizer] = field(repr=False)

    def names(self) -> list[str]:
        """List the canonical names that this checkpoint holds."""
        return list(self._entries)

    def has(self, name: str) -> bool:
        """Say whether the checkpoint holds this canonical weight."""
        return name in self._entries

    def tensor(self, name: str) -> Float[np.ndarray, ...]:
        """Read one canonical weight, unpacked: a fresh float32 array.

        Raises:
            ValueError: the checkpoint has no such weight.
            FormatError: it holds a NaN or an infinity.
        """
        return read_entry(self._file, self._entry(name))

    def packed(self, name: str, *, transposed: bool = False) -> PackedRows | None:
        """Return a canonical matrix in the file's own row format, unchecked (see ``check_packed``).

        Rows stay as they are in the file: a read-only view of it, or a copy where their order differs (q, k).

        Args:
            name: canonical name.
            transposed: ask for the rows of a file that keeps the matrix the other way round, such as [D, F]
                for ``w_down``.

        Returns:
            The rows; None for a vector, for a matrix that the file keeps in the other direction than asked for,
            and for formats that ``kairox_jax.quant`` does not know: read those with ``tensor``.

        Raises:
            ValueError: the checkpoint has no such weight.
        """
        return pack_entry(self._file, self._entry(name), transposed=transposed)

    def release(self) -> None:
        """Give back the memory of the file's pages that ``packed`` rows brought in; the rows stay valid.

        ``tensor`` does this by itself.
        """
        self._file.release()

    def check_packed(self, name: str) -> None:
        """Check what ``packed`` gives, in whichever direction the file keeps the matrix.

        Raises:
            FormatError: it holds a NaN or an infinity.
        """
        entry = self._entry(name)
        packed, source = pack_entry(self._file, entry, transposed=entry.transpose), entry.source
        if packed is not None:
            check_packed(packed, self._file.path_of(source), source)

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer.

        Raises:
            FormatError: the vocabulary is missing, broken or of an unsupported kind.
        """
        return self._load_tokenizer()

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise ValueError(f"{self.path} has no weight {name!r}; see names() for what it holds")
        return self._entries[name]


def open_checkpoint(name_or_path: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a model, fetching it first where it is not here yet.

    Args:
        name_or_path: whatever ``resolve_model`` takes.
        revision: of a Hugging Face repository.

    Raises:
        ValueError: unknown name.
        FetchError: the model could not be fetched.
        FormatError: the files are broken or not supported.
    """
    path = resolve_model(name_or_path, revision=revision)
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    config = gguf_config(file)
    entries = gguf_entries(config)
    check_entries(file, entries)
    template = file.fields.get("tokenizer.chat_template")
    return Checkpoint(
        path=path,
        config=config,
        chat_template=template if isinstance(template, str) else None,
        num_bytes=file.num_bytes,
        _file=file,
        _entries=entries,
        _load_tokenizer=lambda: gguf_tokenizer(file),
    )


def _open_folder(path: Path) -> Checkpoint:
    add_bos = adds_bos(path)
    config = hf_config(path, add_bos=add_bos)
    file = SafetensorsFolder(path)
    # A checkpoint without an output matrix uses its embedding, whatever the config says.
    if not config.tie_embeddings and "lm_head.weight" not in file.shapes:
        config = replace(config, tie_embeddings=True)
    if config.num_layers > len(file.shapes):
        raise FormatError(
            path / "config.json", "num_hidden_layers", f"{config.num_layers}: the files hold fewer"
        )
    entries = hf_entries(config, file.shapes)
    check_entries(file, entries)
    return Checkpoint(
        path=path,
        config=config,
        chat_template=hf_chat_template(path),
        num_bytes=file.num_bytes,
        _file=file,
        _entries=entries,
        _load_tokenizer=partial(
            hf_tokenizer, path, bos_id=config.bos_id, eos_ids=config.eos_ids, add_bos=add_bos
        ),
    )
