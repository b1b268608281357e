"""``python -m kairox_jax``: the same as `kairox`."""

import sys

from kairox_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
