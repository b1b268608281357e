"""A model's files behind one face: config, canonical weights one at a time, tokenizer, chat template."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float

from kairox_jax.config import ModelConfig
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_activation import gguf_activation
from kairox_jax.io.gguf_config import gguf_arch, gguf_config
from kairox_jax.io.gguf_file import GgufFile
from kairox_jax.io.gguf_model import GGUF_IGNORED, gguf_entries, sparse_threshold
from kairox_jax.io.gguf_sparsity import own_sparsity
from kairox_jax.io.gguf_tokenizer import gguf_tokenizer
from kairox_jax.io.hf_config import hf_config
from kairox_jax.io.hf_model import HF_IGNORED, hf_entries
from kairox_jax.io.hf_tokenizer import adds_bos, hf_chat_template, hf_tokenizer
from kairox_jax.io.orbax_folder import INDEX, OrbaxFolder, is_orbax_folder
from kairox_jax.io.registry import resolve_model
from kairox_jax.io.safetensors_file import SafetensorsFolder
from kairox_jax.io.sparsity import Sparsity, load_sparsity
from kairox_jax.io.tokenizer import Tokenizer
from kairox_jax.io.tokenizer_files import FOLDER, VOCABULARY, read_tokenizer
from kairox_jax.io.weights import (
    Entry,
    TensorFile,
    check_entries,
    check_packed,
    check_unused,
    entry_shape,
    file_rows,
    pack_entry,
    packed_format,
    read_entry,
)
from kairox_jax.quant import FORMATS, PackedRows

logger = logging.getLogger("kairox")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened model; weights are read when asked for.

    Canonical names and shapes (row-major; q and k rows in half-split rotary order, as in Hugging Face):
    ``embed`` [V, D], ``out_norm`` [D], ``output`` [V, D] (absent when tied), and per layer
    ``layers.{l}.`` + ``attn_norm`` [D], ``wq`` [N*H, D], ``wk``, ``wv`` [K*H, D], ``wo`` [D, N*H],
    ``ffn_norm`` [D], ``w_gate``, ``w_up``, ``w_down`` [F, D] (row i of each belongs to neuron i).
    Where the config says so: ``bq`` [N*H], ``bk``, ``bv`` [K*H], ``bo`` [D], ``b_up`` [F], ``b_down`` [D],
    ``attn_norm_bias``, ``ffn_norm_bias``, ``out_norm_bias`` [D], ``pos_embed`` [P, D] (row p is position p).
    In PowerInfer files also ``pred_fc1`` [R, D] and ``pred_fc2`` [F, R]: a neuron is forecast to be active where
    fc2 relu(fc1 x) >= ``sparse_threshold``; x is the residual stream after attention, not normalised, and for a
    parallel block the layer's input.

    Attributes:
        path: the file or folder.
        config: the model's facts.
        chat_template: Jinja2 text, or None where the checkpoint has none.
        num_bytes: bytes of all weights in the file.
        sparse_threshold: raw score from which the predictors keep a neuron; None without predictors.
        activation_source: what decided ``config.activation``: a key of the file, or why another one.
        tokenizer_path: the file or folder that holds the tokenizer; None where there is none.
    """

    path: Path
    config: ModelConfig
    chat_template: str | None
    num_bytes: int
    sparse_threshold: float | None = None
    activation_source: str = "config.json"
    tokenizer_path: Path | None
    _file: TensorFile = field(repr=False)
    _entries: Mapping[str, Entry] = field(repr=False)
    _load_tokenizer: Callable[[], Tokenizer] = field(repr=False)
    _load_sparsity: Callable[[], Sparsity | None] = field(repr=False, default=lambda: None)

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
            The rows; None for a vector, for a matrix of quantised blocks that the file keeps in the other direction
            than asked for, and for formats that ``kairox_jax.quant`` does not know: read those with ``tensor``.

        Raises:
            ValueError: the checkpoint has no such weight.
        """
        return pack_entry(self._file, self._entry(name), transposed=transposed)

    def packed_format(self, name: str) -> str | None:
        """Return the format of the rows that ``packed`` gives, without reading them; None where it gives None.

        Raises:
            ValueError: the checkpoint has no such weight.
        """
        return packed_format(self._file, self._entry(name))

    def file_format(self, name: str) -> tuple[str, bool]:
        """Return the format that the file has a weight in, and whether it has the matrix the other way round.

        Raises:
            ValueError: the checkpoint has no such weight.
        """
        entry = self._entry(name)
        return self._file.format_of(entry.source), entry.transpose

    def file_rows(self, name: str) -> np.ndarray:
        """Return a weight's bytes as ``file_format`` says, unchecked: uint8 [*leading, row bytes].

        Raises:
            ValueError: the checkpoint has no such weight.
        """
        return file_rows(self._file, self._entry(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a canonical weight, without reading it.

        Raises:
            ValueError: the checkpoint has no such weight.
        """
        return entry_shape(self._entry(name))

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
        raw, fmt = self._file.raw(entry.source)
        if raw.ndim == 2 and fmt in FORMATS:
            # As the file has them: neither transposing nor reordering changes what a weight is.
            check_packed(PackedRows(data=raw, format=fmt), self._file.path_of(entry.source), entry.source)

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer.

        Raises:
            FormatError: the vocabulary is missing, broken or of an unsupported kind.
        """
        return self._load_tokenizer()

    def own_sparsity(self) -> Sparsity | None:
        """Read the thresholds and the profile that came with the checkpoint itself; None where none did.

        Raises:
            ValueError: they are broken.
        """
        return self._load_sparsity()

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
    if is_orbax_folder(path):
        return _open_orbax(path)
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    activation = gguf_activation(file, *gguf_arch(file))
    config = gguf_config(file, activation)
    entries = gguf_entries(file, config)
    check_entries(file, entries)
    check_unused(file, entries, GGUF_IGNORED)
    if activation.assumed:
        logger.info("activation %s, decided by %s", activation.name, activation.source)
    template = file.fields.get("tokenizer.chat_template")
    return Checkpoint(
        path=path,
        config=config,
        chat_template=template if isinstance(template, str) else None,
        num_bytes=file.num_bytes,
        sparse_threshold=sparse_threshold(file, entries),
        activation_source=activation.source,
        tokenizer_path=path,
        _file=file,
        _entries=entries,
        _load_tokenizer=lambda: gguf_tokenizer(file),
        _load_sparsity=lambda: own_sparsity(file),
    )


def _open_orbax(path: Path) -> Checkpoint:
    folder = OrbaxFolder(path)
    entries = folder.entries()
    check_entries(folder, entries)
    index = folder.index
    template, tokenizer = index.get("chat_template"), index.get("tokenizer")
    tokenizer_path = path / str(tokenizer) if tokenizer in (FOLDER, VOCABULARY) else None
    return Checkpoint(
        path=path,
        config=folder.config,
        chat_template=template if isinstance(template, str) else None,
        num_bytes=folder.num_bytes,
        sparse_threshold=index.number("sparse_threshold", default=0.0)
        if "sparse_threshold" in index.values
        else None,
        activation_source=str(index.get("activation_source")),
        tokenizer_path=tokenizer_path,
        _file=folder,
        _entries=entries,
        _load_tokenizer=partial(read_tokenizer, tokenizer_path, folder.config, path / INDEX),
        _load_sparsity=lambda: load_sparsity(path) if (path / "thresholds.json").is_file() else None,
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
    check_unused(file, entries, HF_IGNORED)
    return Checkpoint(
        path=path,
        config=config,
        chat_template=hf_chat_template(path),
        num_bytes=file.num_bytes,
        tokenizer_path=path,
        _file=file,
        _entries=entries,
        _load_tokenizer=partial(
            hf_tokenizer, path, bos_id=config.bos_id, eos_ids=config.eos_ids, add_bos=add_bos
        ),
    )
