"""PyTorch's ``.bin`` checkpoints are pickles, which can run code when read: they are refused, never opened."""

from __future__ import annotations

from pathlib import Path

# {source}: the folder or repository; DST becomes a folder that can be read.
HOW_TO_CONVERT = (
    "PyTorch pickles (.bin), which can run code when read; convert them once where torch and transformers are "
    'installed: python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "M.from_pretrained('{source}', dtype='auto').save_pretrained('DST'); "
    "T.from_pretrained('{source}').save_pretrained('DST')\", then give DST"
)
_PATTERNS = ("*.bin", "*.bin.index.json", "*.pt", "*.pth")


def find_pickles(folder: Path) -> list[Path]:
    """List a folder's PyTorch checkpoints and their indices."""
    return sorted(file for pattern in _PATTERNS for file in folder.glob(pattern))
