"""``kairox compare --json`` with the facts of the machine and the commit; the arguments are that command's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import facts


def main() -> None:
    """Print one JSON object; progress goes to stderr."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{__doc__}\n\n`kairox compare --help` lists them.")
        return
    command = [sys.executable, "-m", "kairox_jax", "compare", "--json", *sys.argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    arguments = [Path(text).name if Path(text).exists() else text for text in sys.argv[1:]]
    print(json.dumps({"arguments": arguments, "machine": facts(), **json.loads(done.stdout)}, indent=1))


if __name__ == "__main__":
    main()
