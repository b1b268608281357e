"""`kairox generate`: text from a prompt, streamed to standard output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kairox_jax.commands.flags import Flag, UsageError, add_flags
from kairox_jax.commands.launch import load_engine_api, note, prepare_environment, start_engine
from kairox_jax.commands.options import (
    MODEL,
    OUTPUT,
    PLACEMENT,
    SAMPLING,
    generation_config,
    max_tokens_flag,
    placement_config,
)
from kairox_jax.commands.streaming import INTERRUPTED, show
from kairox_jax.config import GenerationConfig

FLAGS = {
    "prompt": (
        Flag(
            dest="prompt", names=("-p", "--prompt"), metavar="TEXT", help="the prompt; - reads standard input"
        ),
        Flag(dest="file", names=("-f", "--file"), metavar="FILE", help="read the prompt from a file"),
        max_tokens_flag(GenerationConfig.max_tokens),
    ),
    "model": MODEL,
    "sampling": (
        *SAMPLING,
        Flag(dest="ignore_eos", names=("--ignore-eos",), help="go on after an end-of-sequence token"),
    ),
    "placement": (
        *PLACEMENT,
        Flag(dest="dry_run", names=("--dry-run",), help="print the memory plan; read no weights"),
    ),
    "output": (
        Flag(dest="json", names=("--json",), help="print one JSON object with text, tokens and statistics"),
        Flag(
            dest="trace_out",
            names=("--trace-out",),
            metavar="FILE",
            help="save each step's active neurons (.npz)",
        ),
        *OUTPUT,
    ),
}

DESCRIPTION = """Continue a prompt. The text goes to standard output as it comes; what runs where, and
one line of statistics, go to standard error. Without -p and -f the prompt is read from
standard input. One newline at the end of a file or of standard input is not part of it.
Each flag is also an environment variable, shown in brackets; the flag wins."""

EXAMPLES = """examples:
  kairox generate -p "The capital of France is" -n 32 --temperature 0
  kairox generate -f notes.txt --vram-budget 6GB --dry-run
  git log -3 | kairox generate -n 64 --json
  kairox generate -p "1. apples" --stop $'\\n\\n'      (bash: a newline)
"""


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "generate",
        help="continue a prompt",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, engine_api: Any | None = None) -> int:
    """Carry out the subcommand.

    Args:
        args: resolved flags.
        engine_api: stands in for ``kairox_jax.engine``.

    Returns:
        The exit status: 0, or 130 after Ctrl-C.
    """
    config = generation_config(args, ignore_eos=args.ignore_eos)
    if args.dry_run:
        return _dry_run(args, engine_api)
    prompt = read_prompt(args)
    if args.trace_out is not None and not Path(args.trace_out).absolute().parent.is_dir():
        raise UsageError(f"--trace-out {args.trace_out}: its folder does not exist; create it first")
    if args.trace_out is not None and args.mode == "dense":
        raise UsageError("--trace-out needs the active neurons, which --mode dense does not tell: use exact")
    engine = start_engine(args, engine_api)
    try:
        if args.json:
            result = engine.generate(prompt, config, trace=args.trace_out)
            print(json.dumps(result.to_json(), allow_nan=False), flush=True)
        else:
            result = show(engine.stream(prompt, config, trace=args.trace_out), args).result
        if result is None:
            return INTERRUPTED
        note(args, result.stats.line())
        return 0
    finally:
        engine.close()


def read_prompt(args: argparse.Namespace) -> str:
    """Take the prompt from -p, -f or standard input.

    Raises:
        UsageError: there is none, or it is empty, or -p and -f are both given.
        ValueError: it is not UTF-8.
    """
    prompt, file = args.prompt, args.file
    if prompt is not None and file is not None:
        if ("prompt" in args.given) == ("file" in args.given):
            raise UsageError("-p and -f both give a prompt: leave one of them out")
        prompt, file = (prompt, None) if "prompt" in args.given else (None, file)
    if file is not None and file != "-":
        prompt = _decode(Path(file).read_bytes(), f"prompt file {file}")
    elif prompt is None or prompt == "-" or file == "-":
        if prompt is None and file is None and sys.stdin.isatty():
            raise UsageError(
                "no prompt: give -p TEXT or -f FILE, or pipe it in; see 'kairox generate --help'"
            )
        prompt = _decode(sys.stdin.buffer.read(), "standard input")
    elif _has_surrogates(prompt):
        raise UsageError("-p is not UTF-8 text: put it into a file and convert it")
    if not prompt:
        raise UsageError("the prompt is empty: give -p TEXT or -f FILE, or pipe it in")
    return prompt


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8 text (byte {error.start}): convert it first") from error


def _has_surrogates(text: str) -> bool:
    """Whether the command line held bytes that are no UTF-8, which Python keeps as lone surrogates."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _dry_run(args: argparse.Namespace, engine_api: Any | None) -> int:
    placement = placement_config(args)
    prepare_environment(args)
    plan = load_engine_api(engine_api).plan_only(
        args.model,
        mode=args.mode,
        placement=placement,
        context_length=args.ctx_size,
        threads=args.threads,
        sparsity=args.sparsity,
        predictors=args.predictors,
    )
    if not args.json:
        print(plan.table())
        return 0
    slots = {"slots_per_layer": plan.slots_per_layer, "num_neurons": plan.num_neurons, "reason": plan.reason}
    print(json.dumps({**plan.to_json(), **slots}, allow_nan=False))
    return 0
