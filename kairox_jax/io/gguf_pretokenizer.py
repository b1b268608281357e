"""How a GGUF file's byte-level BPE cuts text into words: one entry for each known ``tokenizer.ggml.pre``."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_file import GgufFile

KEY = "tokenizer.ggml.pre"
LLAMA_BPE = ("llama-bpe", "llama3", "llama-v3")
_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt")
_DIGITS = ("smollm", "starcoder", "refact", "command-r")
QWEN2 = ("qwen2", "deepseek-r1-qwen")
_PUNCTUATION = ("falcon", "default")
_KNOWN = (*_GPT2, *_DIGITS, *LLAMA_BPE, *QWEN2, *_PUNCTUATION)
# What the files of an architecture mean that name no kind (PowerInfer's are older than the key).
_BY_ARCHITECTURE = {"opt": "gpt-2", "qwen2": "qwen2", "sparse-qwen2": "qwen2"}
_BY_ARCHITECTURE |= {"falcon": "falcon", "relu-falcon": "falcon"}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer_kind(file: GgufFile) -> str:
    """Return the file's kind; one that it does not name follows from its architecture, else is ``default``.

    Raises:
        FormatError: the kind is not known.
    """
    arch = file.fields.get("general.architecture")
    pre = file.fields.get(KEY, _BY_ARCHITECTURE.get(str(arch), "default"))
    if pre not in _KNOWN:
        raise FormatError(
            file.path, KEY, f"{str(pre)[:80]!r} is not supported; expected one of {', '.join(_KNOWN)}"
        )
    return str(pre)


def build_pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """Build the library's pre-tokenizer of a known kind.

    Source: the models' ``tokenizer.json`` files (GPT-2, SmolLM, Llama 3, Qwen2, Falcon); for ``default``
        llama.cpp's list of expressions, which is Falcon's with digits apart.
    """
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind in _GPT2:
        return byte_level
    if kind in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if kind in _PUNCTUATION:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation(behavior="contiguous"),
                byte_level,
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
            ]
        )
    words = Regex(_WORDS % ("" if kind in QWEN2 else "{1,3}"))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
