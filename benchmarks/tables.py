"""Tables of saved measurements: ``python -m benchmarks.tables`` renews those in docs and README.md.

A block from ``<!-- table: NAME FILE -->`` to ``<!-- end table -->`` is replaced; ``--check`` only compares.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.machine import ROOT

RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
DOCUMENTS = (DOCUMENT, ROOT / "README.md", ROOT / "docs" / "gpu.md")
NOT_MEASURED = "Not measured yet."
_BLOCK = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end table -->)", re.DOTALL)

# Two threads that must meet wait for the slower one: a little of others' work costs a lot.
DISTURBED_FRAC = 0.03

Record = dict[str, Any]


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its columns padded to be read as plain text too; numbers stand to the right.

    Raises:
        ValueError: a row with more or fewer cells than there are headers.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"row {list(row)} has {len(row)} cells for {len(headers)} columns")
    widths = [max(len(line[column]) for line in [headers, *rows]) for column in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2)] + ["-" * (width + 1) + ":" for width in widths[1:]]) + "|"
    return "\n".join([line(headers), rule, *map(line, rows)])


def with_spread(samples: Record, digits: int = 1) -> str:
    """Return a median and, in brackets, the least and the most."""
    return f"{samples['median']:.{digits}f} ({samples['min']:.{digits}f}-{samples['max']:.{digits}f})"


def megabytes(num_bytes: float | None) -> str:
    """Return a size in MB, a dash for none."""
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


def cpu_speed(record: Record) -> str:
    """Tokens/s of each rival, and its speed over llama.cpp."""
    rows = []
    for rival in record["rivals"]:
        ratios = [
            f"{with_spread(rival[k], 2)}" if k in rival else "-"
            for k in ("decode_over_peer", "prefill_over_peer")
        ]
        speeds = [with_spread(rival[f"{what}_tokens_per_s"]) for what in ("decode", "prefill")]
        rows.append([rival["name"], speeds[0], ratios[0], speeds[1], ratios[1]])
    return markdown_table(["", "decode tokens/s", "x llama.cpp", "prefill tokens/s", "x llama.cpp"], rows)


def cpu_memory(record: Record) -> str:
    """Memory of each rival's process, and of the device in the budget plan."""
    rows = []
    for rival in record["rivals"]:
        memory, vram = rival["memory"], rival.get("vram_bytes") or {}
        sizes = [memory["peak_bytes"], memory.get("resident_bytes"), vram.get("total"), vram.get("slots")]
        rows.append([rival["name"], *map(megabytes, sizes), f"{rival['load_s']:.1f}"])
    return markdown_table(["MB", "peak", "at the end", "device budget", "of it slots", "load s"], rows)


def cpu_bytes(record: Record) -> str:
    """Bytes that a token reads, and the share of the machine's streaming read that this comes to."""
    limit = record["memory_read_gb_per_s"]["median"]
    parts = ("other_weights", "host_neurons", "device_neurons", "kv_cache", "total")
    rows = []
    for rival in record["rivals"]:
        sizes = [megabytes(rival["touched_bytes"][part]) for part in parts]
        speed = rival["read_gb_per_s"]
        active = rival.get("last_decode", {}).get("hit_rate")
        hits = "-" if active is None else f"{100 * active:.0f} %"
        rows.append([rival["name"], *sizes, f"{speed:.1f}", f"{100 * speed / limit:.0f} %", hits])
    headers = ["MB a token", "other weights", "host neurons", "device neurons", "KV cache", "total"]
    return markdown_table([*headers, "GB/s", "of streaming read", "hit rate"], rows)


def cpu_time(record: Record) -> str:
    """Where a token's time goes; each column adds up to its total."""
    rivals = [rival for rival in record["rivals"] if "time" in rival]
    times = [rival["time"] for rival in rivals]
    rows = [[part, *(f"{time['parts_ms'][part]:.2f}" for time in times)] for part in times[0]["parts_ms"]]
    rows.append(["total", *(f"{time['total_ms']:.2f}" for time in times)])
    rows.append(
        ["total without clocks, median", *(f"{time['unclocked_ms']['median']:.2f}" for time in times)]
    )
    cost = [time["clocks_per_token"] * time["clock_cost_us"] / 1e3 for time in times]
    rows.append(["the clocks themselves", *(f"{ms:.2f}" for ms in cost)])
    return markdown_table(["ms a token", *(rival["name"] for rival in rivals)], rows)


def cpu_facts(record: Record) -> str:
    """One paragraph: what was measured, where and when."""
    settings, load, git = record["settings"], record["load_average"], record["git"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record["versions"].items()))
    commit = f"{(git['commit'] or 'unknown')[:10]}{' with changes' if git['modified'] else ''}"
    limit = with_spread(record["memory_read_gb_per_s"])
    work = f"{settings['repeats']} rounds of {settings['tokens']} decoded tokens"
    work += f" and a prompt of {settings['prefill_tokens']}, context {settings['context']}, greedy"
    cpu = f"{record['threads']} threads on {record['cpu']} ({record['logical_cpus']} logical CPUs"
    cpu += f", load average {load['before']} before and {load['after']} after)"
    when = f"commit {commit}, {record['date'][:10]}"
    line = f"{settings['model']}: {work}; {cpu}; streaming read {limit} GB/s; {when}; {versions}."
    return line + disturbance(record["others_cpu_frac"])


def disturbance(others: Sequence[float | None]) -> str:
    """Return a warning where other processes took CPU time in any counted round, else nothing.

    Args:
        others: their share of the machine's CPU in each round; None where the system does not tell.
    """
    known = [frac for frac in others if frac is not None]
    if max(known, default=0.0) <= DISTURBED_FRAC:
        return ""
    shares = ", ".join(f"{100 * frac:.0f} %" for frac in known)
    return f"\n\n**Do not quote this run: other processes took CPU time in its rounds ({shares}).**"


def host_rows(record: Record) -> str:
    """Random rows of the host's records beside a streaming read, and the time over that of every row."""
    facts, by_case = record["machine"], dict[str, dict[str, Record]]()
    for result in record["results"]:
        by_case.setdefault(result["case"], {})[result["name"]] = result
    rows = []
    for case, found in by_case.items():
        some = found.get("15 % of rows")
        if some is not None:
            stream = found["stream"]["gb_per_s"]
            share = f"{100 * some['gb_per_s'] / stream:.0f} %"
            cells = [f"{stream:.1f}", f"{some['gb_per_s']:.1f}", share, f"{some['times_dense']:.1f}"]
            rows.append([case, *cells])
    commit = (facts["git"]["commit"] or "unknown")[:10]
    line = f"{facts['threads']} threads on {facts['cpu']}, commit {commit}, {facts['date'][:10]}:"
    headers = ["records", "streaming read GB/s", "15 % of rows GB/s", "share", "x faster than all rows"]
    return f"{line}\n\n{markdown_table(headers, rows)}"


def gpu_table(part: str) -> Callable[[Record], str]:
    """Return the table of one part of ``benchmarks.gpu`` or ``bench_callback``; an empty record is not measured."""

    def table(record: Record) -> str:
        from benchmarks.gpu.report import table_of  # which needs this module

        if part not in record.get("parts", {}):
            return NOT_MEASURED
        device = record.get("device", {}).get("name", record["cpu"])
        return f"{device}, {record['date'][:10]}:\n\n{table_of(part, record['parts'][part])}"

    return table


def load_record(file: str) -> Record:
    """Return a saved measurement; of a pattern such as ``gpu/*.json`` the newest, or an empty record for none."""
    if "*" not in file:
        return json.loads((RESULTS / file).read_text())
    records = [json.loads(path.read_text()) for path in RESULTS.glob(file)]
    return max(records, key=lambda record: record["date"], default={})


GPU_PARTS = ("numerics", "bandwidth", "link", "callbacks", "commits", "decode")
TABLES: dict[str, Callable[[Record], str]] = {
    "cpu_facts": cpu_facts,
    "cpu_speed": cpu_speed,
    "cpu_memory": cpu_memory,
    "cpu_bytes": cpu_bytes,
    "cpu_time": cpu_time,
    "host_rows": host_rows,
    **{f"gpu_{part}": gpu_table(part) for part in GPU_PARTS},
}


def cpu_decode_report(record: Record) -> str:
    """Return every table of ``bench_cpu_decode`` as text."""
    blocks = [make(record) for name, make in TABLES.items() if name.startswith("cpu_")]
    if record["peer_missing"]:
        blocks.append(f"llama.cpp took no part: {record['peer_missing']}")
    return "\n\n".join(blocks)


def renew(text: str, load: Callable[[str], Record]) -> str:
    """Return a document with every marked block made anew.

    Args:
        text: the document.
        load: returns a saved measurement by its file's name.

    Raises:
        ValueError: a block asks for a table that does not exist, or does not end.
    """
    if text.count("<!-- table:") != len(_BLOCK.findall(text)):
        raise ValueError(
            "a table block is malformed: expected <!-- table: NAME FILE --> ... <!-- end table -->"
        )

    def block(match: re.Match[str]) -> str:
        start, name, file, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"table {name!r} is unknown: choose one of {', '.join(TABLES)}")
        return f"{start}{TABLES[name](load(file))}\n{end}"

    return _BLOCK.sub(block, text)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status: 1 where --check finds another text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where the document is stale"
    )
    args = parser.parse_args(argv)
    for document in DOCUMENTS:
        old = document.read_text()
        try:
            new = renew(old, load_record)
        except (ValueError, OSError) as error:
            print(f"tables: error: {document.name}: {error}", file=sys.stderr)
            return 2
        if args.check and new != old:
            print(f"tables: {document.name} is stale: run python -m benchmarks.tables", file=sys.stderr)
            return 1
        if new != old:
            document.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
