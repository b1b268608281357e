"""Kairox for JAX: activation-sparse language models on a GPU that cannot hold them.

The names below load on first use: importing the package does not load JAX, which the command line relies on.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kairox_jax.config import GenerationConfig, ModelConfig, PlacementConfig
    from kairox_jax.engine import Engine
    from kairox_jax.io import Tokenizer
    from kairox_jax.models import load_model

__version__ = "0.1.0"
__all__ = [
    "Engine",
    "GenerationConfig",
    "ModelConfig",
    "PlacementConfig",
    "__version__",
    "load_model",
    "load_tokenizer",
]

_HOMES = {
    "Engine": "kairox_jax.engine",
    "GenerationConfig": "kairox_jax.config",
    "ModelConfig": "kairox_jax.config",
    "PlacementConfig": "kairox_jax.config",
    "load_model": "kairox_jax.models",
}


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """Load a model's tokenizer, fetching the model first where it is not here yet.

    Args:
        name_or_path: a registered name, a local file or folder, or a Hugging Face repository.

    Raises:
        ValueError: unknown name.
        FetchError: the model could not be fetched.
        FormatError: its files are broken, or its vocabulary is of an unsupported kind.
    """
    from kairox_jax.io import open_checkpoint

    return open_checkpoint(name_or_path).tokenizer()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
