"""`kairox`: parse the command line, run the subcommand, turn errors into one line and a status.

Nothing here or in what it imports at the top loads JAX, so --help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kairox_jax.commands import chat, convert, doctor, generate, info, laboratory, offline, pull, serve
from kairox_jax.commands.flags import Flag, Parser, misspelled_variables, reject_unknown, resolve
from kairox_jax.commands.streaming import INTERRUPTED

USAGE_STATUS = 2
INTERNAL_STATUS = 1
BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE ended

EPILOG = """start with:
  kairox generate -p "The capital of France is" -n 32
  kairox chat
  kairox serve       an OpenAI-compatible server, and a page to chat and to watch the engine
  kairox doctor      what this machine has, and what is missing for its GPU

The default model is fetched once, about 93 MB. 'kairox COMMAND --help' lists a command's flags.
"""


def main(argv: Sequence[str] | None = None, *, engine_api: Any | None = None) -> int:
    """Run `kairox`.

    Args:
        argv: the words after the program's name; None takes the process's own.
        engine_api: stands in for ``kairox_jax.engine`` (``Engine``, ``plan_only``).

    Returns:
        The exit status: 0; 1 for an error of ours or a broken machine (`doctor`); 2 for a mistake of the
        caller's; 130 after Ctrl-C; 141 where the reader of standard output has gone.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in argv or os.environ.get("KAIROX_DEBUG", "0") not in ("", "0")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? instead of an error
    try:
        with _one_line_messages():
            return _dispatch(argv, engine_api)
    except KeyboardInterrupt:
        print("kairox: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit: let that succeed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, TypeError, OSError, FloatingPointError) as error:
        return _report(describe(error), USAGE_STATUS, debug)
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        return _report(f"{_internal(error)}{hint}", INTERNAL_STATUS, debug)


def make_parser(chosen: str | None = None) -> Parser:
    """Build the parser of `kairox` and its subcommands; ``chosen`` is the one that was asked for."""
    parser = Parser(
        prog="kairox",
        description="Activation-sparse language models on a GPU that cannot hold them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kairox {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in (generate, chat, serve, info, pull, convert, doctor):
        command.add_to(subparsers)
    offline.add_to(subparsers)
    laboratory.add_to(subparsers, chosen)
    return parser


def describe(error: BaseException) -> str:
    """Say an error in one line; lines that a message adds below its first (a plan's table) stay lines."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    text = str(error) or type(error).__name__
    return text if isinstance(error, ValueError) else " ".join(text.split())


def _dispatch(argv: list[str], engine_api: Any | None) -> int:
    parser = make_parser(argv[0] if argv else None)
    if not argv:
        parser.print_help()
        return 0
    args, extra = parser.parse_known_args(argv)
    if args.command is None:
        reject_unknown(extra, (), "kairox")
    reject_unknown(extra, args.flags, f"kairox {args.command}")
    flags = _all_flags(parser)
    if misspelled_variables(os.environ, flags):
        flags += laboratory.all_flags()  # takes 0.4 s, and most environments hold nothing unknown
    for sentence in misspelled_variables(os.environ, flags):
        logging.getLogger("kairox").warning(sentence)
    return args.run(resolve(args, os.environ), engine_api)


def _all_flags(parser: Parser) -> list[Flag]:
    """Return the flags of every subcommand, of the simulator's only the chosen one's."""
    choices = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    return [flag for parsers in choices for each in parsers.values() for flag in each.get_default("flags")]


def _internal(error: Exception) -> str:
    text = describe(error)
    if "RESOURCE_EXHAUSTED" in text or isinstance(error, MemoryError):
        return f"out of memory: give a smaller --vram-budget or -c; {text}"
    return f"internal error: {type(error).__name__}: {text}"


def _report(text: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"kairox: error: {text}", file=sys.stderr)
    return status


@contextmanager
def _one_line_messages() -> Iterator[None]:
    """Print warnings, and what the package logs, as one line each on standard error."""
    before = warnings.formatwarning
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("kairox: %(message)s"))
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"kairox: warning: {message}\n"
    logging.getLogger("kairox").addHandler(handler)
    try:
        yield
    finally:
        warnings.formatwarning = before
        logging.getLogger("kairox").removeHandler(handler)


def _version() -> str:
    try:
        return version("kairox-jax")
    except PackageNotFoundError:
        return "(source tree, not installed)"


if __name__ == "__main__":
    sys.exit(main())
