"""Decode and prefill on a CPU: speed, memory, bytes touched, where the time goes; llama.cpp in the same run.

Every rival is a process of its own; they take turns, round by round, so that a machine that others use drifts
for all alike. The first round warms up and is not counted. Tables go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import machine
from benchmarks.cpu_llama import BUILD
from benchmarks.cpu_prompts import LONG_PROMPT, PREFILL_TOKENS, PROMPTS
from benchmarks.rival_process import RivalProcess
from benchmarks.spread import mean_parts, paired_ratios, spread
from benchmarks.tables import cpu_decode_report

START = perf_counter()
PEER = "llama.cpp"
SLOTS = (0, 384, 768)
OURS: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense", "slots": None},
    **{f"exact {slots}": {"mode": "exact", "slots": slots} for slots in SLOTS},
    "predicted 0": {"mode": "predicted", "slots": 0},
    "dense int8": {"mode": "dense", "slots": None, "activations": "int8"},
    "exact 0 int8": {"mode": "exact", "slots": 0, "activations": "int8"},
    "predicted 0 int8": {"mode": "predicted", "slots": 0, "activations": "int8"},
}
RIVALS = tuple(OURS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        model: name or path.
        repeats: counted rounds.
        tokens: decode steps of a round.
        context: positions of every rival.
        rivals: which of ``RIVALS`` take part.
    """

    model: str
    repeats: int
    tokens: int
    context: int
    rivals: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("repeats", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1")
        if not self.rivals or not set(self.rivals) <= set(RIVALS):
            raise ValueError(f"--rivals {','.join(self.rivals)}: name one or more of {', '.join(RIVALS)}")
        if self.context < PREFILL_TOKENS + 64 + self.tokens:
            raise ValueError(
                f"--context {self.context} is too small for {PREFILL_TOKENS} prompt tokens and {self.tokens} "
                f"new ones: give at least {PREFILL_TOKENS + 64 + self.tokens}"
            )


def say(text: str) -> None:
    """Tell how far the run is."""
    print(f"bench_cpu_decode: {perf_counter() - START:5.0f} s {text}", file=sys.stderr, flush=True)


def start_rivals(settings: Settings) -> tuple[dict[str, RivalProcess], str | None]:
    """Start every rival, one after the other.

    Returns:
        The processes by name in their turn, and why llama.cpp is missing, or None.
    """
    rivals: dict[str, RivalProcess] = {}
    try:
        for name in settings.rivals:
            say(f"loading {name}")
            what = {"model": settings.model, "context": settings.context, **OURS[name]}
            rivals[name] = RivalProcess("kairox", **what)
        first = rivals[settings.rivals[0]].facts
        missing = peer_missing(first["model_path"])
        if missing is None:
            say(f"loading {PEER}")
            rivals[PEER] = RivalProcess(
                "llama",
                path=first["model_path"],
                threads=first["threads"],
                context=settings.context,
                weights_bytes=first["weights_bytes"],
                cache_elements=first["cache_elements"],
            )
        rivals["read"] = RivalProcess("read")
    except BaseException:
        stop_rivals(rivals)
        raise
    return rivals, missing


def stop_rivals(rivals: dict[str, RivalProcess]) -> None:
    """End every process."""
    for rival in rivals.values():
        rival.close()


def peer_missing(model_path: str) -> str | None:
    """Return why llama.cpp cannot take part, or None."""
    if not model_path.endswith(".gguf"):
        return "llama.cpp reads GGUF files only"
    if importlib.util.find_spec("llama_cpp") is None:
        return f"llama-cpp-python is not installed\n{BUILD}"
    return None


def run_round(
    rivals: dict[str, RivalProcess], prompt: list[int], long_prompt: list[int], tokens: int
) -> dict[str, dict[str, Any]]:
    """Give each rival its turn: decode and prefill."""
    results: dict[str, dict[str, Any]] = {}
    for name, rival in rivals.items():
        say(f"  {name}")
        result = {"decode": rival.ask("decode", ids=prompt, tokens=tokens)}
        if name != "read":
            result["counts"] = rival.ask("counts", tokens=tokens)
            result["prefill"] = rival.ask("prefill", ids=long_prompt)
        results[name] = result
    return results


def run_clocked(
    rivals: dict[str, RivalProcess], prompt: list[int], tokens: int, results: dict[str, dict[str, Any]]
) -> None:
    """Add a decode with clocks inside to the results of a round; apart, so that it disturbs no other turn."""
    for name, rival in rivals.items():
        if name.startswith("exact"):
            results[name]["parts"] = rival.ask("parts", ids=prompt, tokens=tokens)


def summarise(name: str, rival: RivalProcess, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return everything that was measured of one rival; ``rounds`` are the counted ones."""
    mine = [one[name] for one in rounds]
    kept = ("load_s", "description", "slots_per_layer", "vram_bytes", "device")
    record: dict[str, Any] = {"name": name, **{k: rival.facts[k] for k in kept if k in rival.facts}}
    for what in ("decode", "prefill"):
        record[f"{what}_tokens_per_s"] = spread([one[what]["tokens_per_s"] for one in mine])
    touched = mine[-1]["counts"]["touched_bytes"]
    record |= {"memory": rival.ask("memory"), "touched_bytes": touched}
    record["read_gb_per_s"] = touched["total"] * record["decode_tokens_per_s"]["median"] / 1e9
    if "last_decode" in mine[-1]["counts"]:
        record["last_decode"] = mine[-1]["counts"]["last_decode"]
    clocked = [one["parts"] for one in mine if "parts" in one]
    if clocked:
        record["time"] = {
            "parts_ms": mean_parts([one["parts_ms"] for one in clocked]),
            "total_ms": sum(one["total_ms"] for one in clocked) / len(clocked),
            "unclocked_ms": spread([1e3 / one["decode"]["tokens_per_s"] for one in mine]),
            "clocks_per_token": clocked[-1]["clocks_per_token"],
            "clock_cost_us": min(one["clock_cost_us"] for one in clocked),
        }
    return record


def add_ratios(records: list[dict[str, Any]]) -> None:
    """Add the speed over llama.cpp to every other record, where it took part."""
    peer = next((record for record in records if record["name"] == PEER), None)
    for record in records:
        if peer is not None and record is not peer:
            for what in ("decode", "prefill"):
                key = f"{what}_tokens_per_s"
                record[f"{what}_over_peer"] = paired_ratios(record[key]["samples"], peer[key]["samples"])


def measure(settings: Settings) -> dict[str, Any]:
    """Run everything and return the record that ``--json`` writes."""
    begin, before = perf_counter(), machine.load_average()
    rivals, missing = start_rivals(settings)
    try:
        encoder = rivals[settings.rivals[0]]
        prompts = [encoder.ask("encode", text=text)["ids"] for text in PROMPTS]
        text = LONG_PROMPT
        while len(long_prompt := encoder.ask("encode", text=text)["ids"][:PREFILL_TOKENS]) < PREFILL_TOKENS:
            text += "\n" + LONG_PROMPT
        rounds, others = [], []
        pids = [os.getpid(), *(rival.pid for rival in rivals.values())]
        for number in range(settings.repeats + 1):
            say("warm-up" if number == 0 else f"round {number} of {settings.repeats}")
            prompt = prompts[number % len(prompts)]
            before_round = machine.cpu_use(pids)
            results = run_round(rivals, prompt, long_prompt, settings.tokens)
            run_clocked(rivals, prompt, settings.tokens, results)
            rounds.append(results)
            others.append(machine.others_frac(before_round, machine.cpu_use(pids), os.cpu_count() or 1))
        counted = rounds[1:]
        records = [summarise(name, rival, counted) for name, rival in rivals.items() if name != "read"]
        add_ratios(records)
        facts = machine.facts()
        for rival in rivals.values():
            facts["versions"] |= rival.facts.get("versions", {})
        return {
            "benchmark": "cpu_decode",
            **facts,
            "settings": {
                "model": Path(encoder.facts["model_path"]).name,
                "repeats": settings.repeats,
                "tokens": settings.tokens,
                "prefill_tokens": PREFILL_TOKENS,
                "context": settings.context,
                "prompts": list(PROMPTS),
            },
            "threads": encoder.facts["threads"],
            "load_average": {"before": before, "after": machine.load_average()},
            "others_cpu_frac": others[1:],
            "seconds": round(perf_counter() - begin, 1),
            "memory_read_gb_per_s": spread([one["read"]["decode"]["gb_per_s"] for one in counted]),
            "peer_missing": missing,
            "rivals": records,
        }
    finally:
        stop_rivals(rivals)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_cpu_decode",
        description=__doc__,
        epilog=BUILD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m", help="name or path (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything that was measured to this file"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="counted rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="decode steps of a round (default: %(default)s)"
    )
    parser.add_argument(
        "--context", type=int, default=512, metavar="N", help="positions (default: %(default)s)"
    )
    parser.add_argument(
        "--rivals",
        type=lambda text: [name.strip() for name in text.split(",")],
        default=list(RIVALS),
        metavar="A,B",
        help=f"which of our forms take part (default: {','.join(RIVALS)})",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    args = make_parser().parse_args(argv)
    try:
        model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
        settings = Settings(
            model=model,
            repeats=args.repeats,
            tokens=args.tokens,
            context=args.context,
            rivals=tuple(args.rivals),
        )
        record = measure(settings)
    except ValueError as error:
        print(f"bench_cpu_decode: error: {error}", file=sys.stderr)
        return 2
    print(cpu_decode_report(record))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
