"""The subcommands of `kairox`, one file each: `add_to(subparsers)` and `run(args, engine_api) -> status`.

Parsing needs neither JAX nor a model: whatever does is imported inside `run`.
"""
