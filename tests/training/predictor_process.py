"""Runs `kairox` on the tiny model of conftest.py in a process of its own, which a test may kill."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import conftest  # noqa: E402

from kairox_jax import cli  # noqa: E402
from training import predictors  # noqa: E402

if __name__ == "__main__":
    tiny: Any = lambda name: conftest.TinySource()  # noqa: E731
    predictors.open_checkpoint = tiny
    sys.exit(cli.main(sys.argv[1:]))
