"""`kairox serve`: the OpenAI-compatible server and its page."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from kairox_jax.commands.flags import Flag, UsageError, add_flags, number, positive_number, whole_number
from kairox_jax.commands.launch import prepare_environment, start_engine
from kairox_jax.commands.options import MODEL, OUTPUT, PLACEMENT, SAMPLING, placement_config
from kairox_jax.config import MAX_PARALLEL, GenerationConfig, parse_bytes


def sequences(text: str) -> int:
    """Convert to a number of sequences that one step can take."""
    if (value := positive_number(text)) > MAX_PARALLEL:
        raise ValueError(f"{text!r}: choose 1 to {MAX_PARALLEL} sequences")
    return value


FLAGS = {
    "server": (
        Flag(
            dest="host",
            names=("--host",),
            metavar="ADDRESS",
            default="127.0.0.1",
            help="where to listen; 0.0.0.0 lets other machines in: set an --api-key then",
        ),
        Flag(
            dest="port",
            names=("--port",),
            metavar="N",
            convert=whole_number,
            default=8080,
            help="0 takes a free one",
        ),
        Flag(
            dest="api_key",
            names=("--api-key",),
            metavar="KEY",
            help="what clients must send; better given as a variable, which other users cannot see",
        ),
        Flag(
            dest="alias",
            names=("--alias",),
            metavar="NAME",
            help="what clients call the model; the end of MODEL where not given",
        ),
        Flag(
            dest="parallel",
            names=("--parallel",),
            metavar="N",
            convert=sequences,
            default=1,
            help=f"sequences that share each step, 1 to {MAX_PARALLEL}; each has a cache of the whole context",
        ),
        Flag(
            dest="max_waiting",
            names=("--max-waiting",),
            metavar="N",
            convert=positive_number,
            default=64,
            help="requests in the queue; more get status 429",
        ),
        Flag(
            dest="timeout",
            names=("--timeout",),
            metavar="SECONDS",
            convert=number,
            default=600.0,
            help="the longest that a request may take, waiting included; 0 for no limit",
        ),
        Flag(
            dest="grace",
            names=("--grace",),
            metavar="SECONDS",
            convert=number,
            default=10.0,
            help="how long streams may go on at shutdown",
        ),
        Flag(
            dest="max_body",
            names=("--max-body",),
            metavar="SIZE",
            convert=parse_bytes,
            default=4 * 2**20,
            help="the largest request",
        ),
        Flag(
            dest="cors_origin",
            names=("--cors-origin",),
            metavar="ORIGIN",
            repeat=True,
            default=(),
            help="a web origin that may call the server; may be given several times",
        ),
        Flag(
            dest="allow_host",
            names=("--allow-host",),
            metavar="NAME",
            repeat=True,
            default=(),
            help="a name for a server behind a proxy; may be given several times",
        ),
        Flag(dest="log_prompts", names=("--log-prompts",), help="write prompts to the log"),
    ),
    "model": MODEL,
    "sampling, for what a request leaves out": (
        *(flag for flag in SAMPLING if flag.dest not in ("seed", "stop")),
        Flag(
            dest="seed",
            names=("--seed",),
            metavar="N",
            convert=whole_number,
            help="of requests without a seed; a new one for each where not given",
        ),
    ),
    "placement": PLACEMENT,
    "output": OUTPUT,
}

DESCRIPTION = """Serve the model by OpenAI's API under /v1, with a page at / to chat and to watch the engine.
The server listens at once and loads the model in the background; /health says when it is ready.
Each flag is also an environment variable, shown in brackets; the flag wins."""

EXAMPLES = """examples:
  kairox serve
  kairox serve -m model.gguf --gpu-cache-neurons 300 --tam-beta 0.90 --host 127.0.0.1 --port 8080
  KAIROX_API_KEY=secret kairox serve --host 0.0.0.0
"""


def add_to(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve the model by OpenAI's API, and a page",
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
        The exit status: 0 after a signal.

    Raises:
        UsageError: the server's packages are not installed.
    """
    placement_config(args)  # a mistake should be told before the server listens
    prepare_environment(args)
    logging.getLogger("kairox").setLevel(logging.WARNING if args.quiet else logging.INFO)
    try:
        from kairox_jax import server
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kairox_jax"):
            raise
        raise UsageError(
            f"kairox serve needs the package {error.name}: pip install 'kairox-jax[server]'"
        ) from error
    settings = server.ServerSettings(
        model_name=args.alias or model_name(args.model),
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        cors_origins=args.cors_origin,
        allow_hosts=args.allow_host,
        max_body_bytes=args.max_body,
        max_waiting=args.max_waiting,
        timeout_s=args.timeout,
        grace_s=args.grace,
        log_prompts=args.log_prompts,
        defaults=GenerationConfig(
            temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p
        ),
        seed=args.seed,
    )
    server.serve(settings, lambda: start_engine(args, engine_api, parallel=args.parallel))
    return 0


def model_name(model: str) -> str:
    """Return what clients call a model: the last part of its path, without .gguf."""
    return Path(model).name.removesuffix(".gguf") or model
