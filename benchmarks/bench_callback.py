"""Cost of each host callback on this machine: ``python -m benchmarks.bench_callback`` writes JSON.

On a CPU "device" and host share the cores, so that its overlap says little; ``benchmarks.gpu`` measures a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import machine
from benchmarks.gpu import callbacks
from benchmarks.gpu.report import table_of
from benchmarks.gpu.settings import SIZES, TimeBox

DEFAULT = machine.ROOT / "benchmarks/results/host_callback.json"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_callback", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT, help="JSON file")
    parser.add_argument("--repeats", type=int, default=51, help="samples of each time")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    args = parser.parse_args(argv)
    before = machine.load_average()
    result = callbacks.run(replace(SIZES[args.size], repeats=args.repeats), TimeBox(300))
    record = machine.facts() | {
        "load_average": {"before": before, "after": machine.load_average()},
        "parts": {"callbacks": result},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table_of("callbacks", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
