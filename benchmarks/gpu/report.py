"""The tables of the GPU measurements, from their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.tables import markdown_table

Result = dict[str, Any]


def table_of(part: str, result: Result) -> str:
    """Return a part's table; of a part that failed, its error."""
    if "failed" in result:
        return f"{part} failed: {result['failed']}"
    text = TABLES[part](result)
    return text + "\n\nCut short: its time was over." if result.get("cut") else text


def numerics(result: Result) -> str:
    """Worst error of each operation and implementation."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for row in result["rows"]:
        groups.setdefault((row["case"].split("/")[0], row["implementation"]), []).append(row)
    rows = []
    for (op, implementation), of_group in groups.items():
        errors = [row["error"] for row in of_group if "error" in row]
        good = sum(bool(row.get("ok")) for row in of_group)
        worst = f"{max(errors):.1e}" if errors else "-"
        failed = next((row["failed"] for row in of_group if "failed" in row), "")
        rows.append([f"{op}, {implementation}", f"{good} of {len(of_group)}", worst, failed])
    return markdown_table(["kernel", "right", "worst relative error", "first failure"], rows)


def bandwidth(result: Result) -> str:
    """GB/s and per cent of a copy, a line for each shape, format and share."""
    names = ("pallas", "triton", "xla", "dense")
    groups: dict[tuple[str, str, float], dict[str, str]] = {}
    for row in result["rows"]:
        cell = "failed"
        if "gb_per_s" in row:
            cell = f"{row['us']:.0f} us, {row['gb_per_s']:.0f} GB/s, {100 * row['of_copy_frac']:.0f} %"
        key = (row["shape"], row["dtype"], row["active_frac"])
        groups.setdefault(key, {})[row["implementation"]] = cell
    rows = [
        [f"{shape} {dtype} {100 * frac:.0f} %", *(cells.get(name, "-") for name in names)]
        for (shape, dtype, frac), cells in groups.items()
    ]
    head = f"A copy moves {result['copy_gb_per_s']:.0f} GB/s (read and written).\n\n"
    return head + markdown_table(["rows, active", *names], rows)


def link(result: Result) -> str:
    """GB/s of each size and kind of memory."""
    kinds = list(dict.fromkeys(row["memory"] for row in result["rows"]))
    sizes = list(dict.fromkeys(row["bytes"] for row in result["rows"]))
    cells = {(row["bytes"], row["memory"]): row for row in result["rows"]}
    rows = [
        [f"{size / 1024:.0f}", *(_number(cells.get((size, kind), {}), "gb_per_s") for kind in kinds)]
        for size in sizes
    ]
    return markdown_table(["KiB", *(f"{kind}, GB/s" for kind in kinds)], rows)


def callbacks(result: Result) -> str:
    """Microseconds of each backend and length of host work."""
    keys = ("callback_us", "device_us", "both_us")
    rows = []
    for row in result["rows"]:
        overlap = row.get("failed", "-")
        if "overlap_frac" in row and row["work_us"]:  # of no work nothing can overlap
            overlap = f"{100 * row['overlap_frac']:.0f} %"
        rows.append([f"{row['backend']}, {row['work_us']} us", *(_number(row, key) for key in keys), overlap])
    return markdown_table(["backend, host work", "callback us", "device us", "both us", "overlapped"], rows)


def commits(result: Result) -> str:
    """What a promotion adds to a layer."""
    rows = [
        [
            str(row["records"]),
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['layer_us']:.0f}",
            f"{row['with_commit_us']:.0f}",
            f"{row['with_commit_us'] - row['layer_us']:.0f}",
        ]
        for row in result["rows"]
    ]
    return markdown_table(["records", "MB", "layer us", "with a promotion us", "more us"], rows)


def decode(result: Result) -> str:
    """Tokens/s of each model size, budget and policy."""
    rows = []
    for row in result["rows"]:
        name = f"{row['layers']} layers, {row['budget_bytes'] / 1e9:.2g} GB, {row.get('policy', '-')}"
        if "failed" in row:
            rows.append([name, row["failed"], "-", "-", "-", "-"])
            continue
        rows.append(
            [
                name,
                f"{row['tokens_per_s']:.1f}",
                f"{row['slots_per_layer']}",
                f"{100 * row['active_frac']:.0f} %",
                f"{100 * row['hit_frac']:.0f} %",
                f"{row['promotions']}",
            ]
        )
    return markdown_table(
        ["model, budget, policy", "tokens/s", "slots a layer", "active", "hits", "moved in"], rows
    )


TABLES = {
    "numerics": numerics,
    "bandwidth": bandwidth,
    "link": link,
    "callbacks": callbacks,
    "commits": commits,
    "decode": decode,
}


def _number(row: Result, key: str, digits: int = 1) -> str:
    return f"{row[key]:.{digits}f}" if key in row else "-"


def report(record: Result) -> str:
    """Return all tables of a record as text."""
    blocks: Sequence[str] = [
        f"{part}\n\n{table_of(part, result)}" for part, result in record["parts"].items()
    ]
    return "\n\n".join(blocks)
