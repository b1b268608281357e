"""Which activation a GGUF file's FFN has: the format has no key for it, so the decision is made here, visibly."""

from __future__ import annotations

import re
from typing import NamedTuple

from kairox_jax.config import ACTIVATIONS
from kairox_jax.io.errors import FormatError
from kairox_jax.io.gguf_arch import GgufArch
from kairox_jax.io.gguf_fields import get_field
from kairox_jax.io.gguf_file import GgufFile

ACTIVATION_KEY, THRESHOLD_KEY = "kairox.activation", "kairox.activation_threshold"
# Metadata in which a converter leaves the source's name.
_NAME_KEYS = (
    "general.name",
    "general.basename",
    "general.finetune",
    "general.source.huggingface.repository",
    "general.source.url",
    "general.source.repo_url",
    "general.base_model.0.name",
    "general.base_model.0.repo_url",
)
# Published sparse models whose GGUF files carry the name of a SiLU or GELU architecture.
_SPARSE_NAMES = (
    ("llama", r"prosparse", "fatrelu", 0.01),
    ("llama", r"relu[\s_-]?llama", "relu", 0.0),
    ("llama", r"bamboo|turbo[\s_-]?sparse", "drelu", 0.0),
    ("qwen2", r"sparse[\s_-]?qwen", "drelu", 0.0),
    ("falcon", r"relu[\s_-]?falcon", "relu", 0.0),
)
_HINT = re.compile(r"relu(?!de)|sparse-?llm", re.IGNORECASE)  # no prelude


class GgufActivation(NamedTuple):
    """An activation, its threshold, and what in the file decided it.

    ``assumed``: nothing in the file states it; it follows from the model's name or from the kind of file.
    """

    name: str
    threshold: float
    source: str
    assumed: bool


def gguf_activation(file: GgufFile, arch_name: str, arch: GgufArch) -> GgufActivation:
    """Decide which activation a file's FFN has.

    In this order: the key ``kairox.activation``; an architecture that has no other one (``bamboo``,
    ``prosparse-llama``, ``opt``, ...); a PowerInfer file, whose engine computes ReLU for every architecture but
    ``bamboo``; a key ``pred_lora``, which only files for sparse engines have; the names of published sparse
    models; else what llama.cpp computes for the architecture.

    Raises:
        FormatError: the activation is not supported, or the file's name hints at a sparse model that is not
            known: running it as SiLU would give wrong text.

    Source: the graphs of llama.cpp, PowerInfer (``llm_build_ffn_sparse``) and kairox.cpp.
    """
    if ACTIVATION_KEY in file.fields:
        return _stated(file)
    if arch.activation in ACTIVATIONS and arch.activation != "silu":
        source = f"architecture {arch_name!r}"
        return GgufActivation(arch.activation, arch.threshold, source, False)
    if file.is_powerinfer:
        return GgufActivation("relu", 0.0, "PowerInfer computes ReLU for this architecture", True)
    if f"{arch_name}.pred_lora" in file.fields and arch_name in ("qwen2", "falcon"):
        name = "drelu" if arch_name == "qwen2" else "relu"
        return GgufActivation(name, 0.0, f"the key {arch_name}.pred_lora", True)
    return _by_name(file, arch_name, arch)


def _stated(file: GgufFile) -> GgufActivation:
    name = get_field(file, ACTIVATION_KEY, str)
    if name not in ACTIVATIONS:
        raise FormatError(file.path, ACTIVATION_KEY, f"{name!r} is not one of {', '.join(ACTIVATIONS)}")
    if name == "fatrelu" and THRESHOLD_KEY not in file.fields:
        raise FormatError(file.path, THRESHOLD_KEY, "missing: FATReLU needs its threshold")
    threshold = get_field(file, THRESHOLD_KEY, float, 0.0)
    return GgufActivation(name, threshold, f"the key {ACTIVATION_KEY}", False)


def _by_name(file: GgufFile, arch_name: str, arch: GgufArch) -> GgufActivation:
    names = {key: value for key in _NAME_KEYS if isinstance(value := file.fields.get(key), str)}
    for key, value in names.items():
        for of_arch, pattern, activation, threshold in _SPARSE_NAMES:
            if of_arch == arch_name and re.search(pattern, value, re.IGNORECASE):
                return GgufActivation(activation, threshold, f"{key} {value[:80]!r}", True)
    for key, value in names.items():
        if _HINT.search(value):
            raise FormatError(
                file.path,
                key,
                f"{value[:80]!r} hints at a sparse activation, which a {arch_name} file cannot state: use the "
                f"safetensors source, whose config.json names it, or add the key {ACTIVATION_KEY}",
            )
    if arch.activation not in ACTIVATIONS:
        raise FormatError(
            file.path,
            "general.architecture",
            f"{arch_name!r} files compute {arch.activation.upper()}, which is not supported; where this model has "
            f"another activation, use its safetensors source or add the key {ACTIVATION_KEY}",
        )
    return GgufActivation(arch.activation, arch.threshold, f"architecture {arch_name!r}", False)
