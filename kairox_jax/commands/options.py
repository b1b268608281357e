"""The flags that several subcommands share, and the configs that they make."""

from __future__ import annotations

import argparse

from kairox_jax.commands.flags import Flag, UsageError, number, positive_number, whole_number
from kairox_jax.config import (
    GUIDE_SETTINGS,
    HOST_ACTIVATIONS,
    LEAST_CONTEXT,
    MODES,
    SLOT_FORMATS,
    GenerationConfig,
    PlacementConfig,
    parse_bytes,
    parse_link,
)

DEFAULT_MODEL = "smollm2-135m"


def _one_of_modes(text: str) -> str:
    if text not in MODES:
        raise ValueError(f"{text!r} is not one of {', '.join(MODES)}")
    return text


def _one_of_slot_formats(text: str) -> str:
    if text not in SLOT_FORMATS:
        raise ValueError(f"{text!r} is not one of {', '.join(SLOT_FORMATS)}")
    return text


def _context(text: str) -> int:
    if (value := whole_number(text)) < LEAST_CONTEXT:
        raise ValueError(
            f"{text!r} holds no prompt and answer: give at least {LEAST_CONTEXT} tokens, one for each"
        )
    return value


def _link(text: str) -> str:
    parse_link(text)
    return text


MODEL = (
    Flag(
        dest="model",
        names=("-m", "--model"),
        metavar="MODEL",
        default=DEFAULT_MODEL,
        help="a name for 'kairox pull', a GGUF file, a folder (Hugging Face or Orbax), or a Hugging Face repository",
    ),
    Flag(
        dest="ctx_size",
        names=("-c", "--ctx-size"),
        metavar="N",
        convert=_context,
        help="tokens of prompt and answer together; the model's own, at most 2048, where not given",
    ),
    Flag(
        dest="threads",
        names=("-t", "--threads"),
        metavar="N",
        convert=positive_number,
        help="host threads; the physical cores where not given",
    ),
)

PLACEMENT = (
    Flag(
        dest="mode",
        names=("--mode",),
        metavar="|".join(MODES),
        convert=_one_of_modes,
        default="exact",
        help="dense computes every neuron, exact only those that are active, predicted only those that are forecast",
    ),
    Flag(
        dest="predictors",
        names=("--predictors",),
        metavar="FOLDER",
        help="predictors of mode predicted; the model's own or the shipped ones where not given",
    ),
    Flag(
        dest="sparsity",
        names=("--sparsity",),
        metavar="FOLDER",
        help="thresholds and profile of the model; the shipped ones where not given",
    ),
    Flag(
        dest="policy",
        names=("--policy",),
        metavar="NAME",
        default=PlacementConfig.policy,
        help="how neurons are placed: split moves what saves time, guide by momentum, static leaves them; auto is "
        "guide where a flag of guide's is given, else split",
    ),
    Flag(
        dest="vram_budget",
        names=("--vram-budget",),
        metavar="SIZE",
        convert=parse_bytes,
        help="device memory for everything, such as 6GB or 512MiB; what is free where not given",
    ),
    Flag(
        dest="gpu_cache_neurons",
        names=("--gpu-cache-neurons",),
        metavar="N",
        convert=whole_number,
        help="slots a layer; what the budget leaves where not given, none without budget and accelerator",
    ),
    Flag(
        dest="slot_format",
        names=("--slot-format",),
        metavar="|".join(SLOT_FORMATS),
        convert=_one_of_slot_formats,
        default=PlacementConfig.slot_format,
        help="what slots hold: packed keeps the file's format, auto takes float32 on a CPU device only",
    ),
    Flag(
        dest="tam_beta",
        names=("--tam-beta",),
        metavar="X",
        convert=number,
        default=PlacementConfig.tam_beta,
        help="of guide: momentum that a neuron keeps at each step",
    ),
    Flag(
        dest="tam_threshold",
        names=("--tam-threshold",),
        metavar="X",
        convert=number,
        default=PlacementConfig.tam_threshold,
        help="of guide: momentum from which a neuron is promoted",
    ),
    Flag(
        dest="tam_evict",
        names=("--tam-evict",),
        metavar="X",
        convert=number,
        default=PlacementConfig.tam_evict,
        help="of guide: momentum under which a resident neuron is evicted",
    ),
    Flag(
        dest="anb_enable",
        names=("--anb-enable",),
        off_names=("--no-anb",),
        default=PlacementConfig.anb_enable,
        help="of guide: let measured times move the promotion threshold",
    ),
    Flag(
        dest="emulated_link",
        names=("--emulated-link",),
        metavar="SPEED,LATENCY",
        convert=_link,
        help="hold promotions to a link such as 3.3GB/s,20us, to see what placement does on another machine",
    ),
    Flag(
        dest="host_callback",
        names=("--host-callback",),
        metavar="NAME",
        default=PlacementConfig.host_callback,
        help="how the host's part is called: split by Python; pure, buffer or ffi from one program a layer",
    ),
    Flag(
        dest="host_activations",
        names=("--host-activations",),
        metavar="|".join(HOST_ACTIVATIONS),
        default=PlacementConfig.host_activations,
        help="inputs of the host's products with packed rows: float32 as they are, int8 rounded, and faster",
    ),
)

SAMPLING = (
    Flag(
        dest="temperature",
        names=("--temperature", "--temp"),
        metavar="X",
        convert=number,
        default=GenerationConfig.temperature,
        help="0 takes the most probable token",
    ),
    Flag(
        dest="top_k",
        names=("--top-k",),
        metavar="N",
        convert=whole_number,
        default=GenerationConfig.top_k,
        help="keep the N most probable tokens; 0 keeps all",
    ),
    Flag(
        dest="top_p",
        names=("--top-p",),
        metavar="X",
        convert=number,
        default=GenerationConfig.top_p,
        help="keep the smallest set whose probability reaches X; 1 keeps all",
    ),
    Flag(
        dest="min_p",
        names=("--min-p",),
        metavar="X",
        convert=number,
        default=GenerationConfig.min_p,
        help="keep tokens of at least X times the best one's probability; 0 keeps all",
    ),
    Flag(
        dest="seed",
        names=("--seed",),
        metavar="N",
        convert=whole_number,
        default=GenerationConfig.seed,
        help="the same seed gives the same tokens",
    ),
    Flag(
        dest="stop",
        names=("--stop",),
        metavar="TEXT",
        repeat=True,
        default=(),
        help="end before this text; may be given several times",
    ),
)

OUTPUT = (
    Flag(dest="quiet", names=("--quiet",), help="no lines about placement and speed on standard error"),
    Flag(dest="debug", names=("--debug",), help="show the traceback of an error"),
)


def max_tokens_flag(default: int) -> Flag:
    """The flag -n, with a subcommand's own default."""
    return Flag(
        dest="max_tokens",
        names=("-n", "--max-tokens", "--n-predict"),
        metavar="N",
        convert=whole_number,
        default=default,
        help="the most new tokens",
    )


def placement_config(args: argparse.Namespace) -> PlacementConfig:
    """Make the placement's config from resolved flags; a flag that only guide reads chooses it.

    Raises:
        UsageError: such a flag, at whatever value, beside another policy's name or mode dense.
        ValueError: a value out of its range.
    """
    meant = _chosen_of_guide(args)
    if meant and args.mode == "dense":
        raise UsageError(
            f"no effect with --mode dense: {', '.join(meant)}; leave it out, or use --mode exact"
        )
    if meant and args.policy not in ("auto", "guide"):
        from kairox_jax.balancing import make_policy

        make_policy(args.policy)  # says so where the name is unknown
        raise UsageError(f"{meant[0]} has no effect with --policy {args.policy}: leave it out, or use guide")
    return PlacementConfig(
        vram_budget_bytes=args.vram_budget,
        gpu_cache_neurons=args.gpu_cache_neurons,
        policy="guide" if meant else args.policy,
        slot_format=args.slot_format,
        tam_beta=args.tam_beta,
        tam_threshold=args.tam_threshold,
        tam_evict=args.tam_evict,
        anb_enable=args.anb_enable,
        emulated_link=args.emulated_link,
        host_callback=args.host_callback,
        host_activations=args.host_activations,
    )


def _chosen_of_guide(args: argparse.Namespace) -> list[str]:
    """Return what was given, as flags or variables, of the settings that only guide reads, as it was written."""
    flags = {flag.dest: flag for flag in PLACEMENT}
    written = []
    for name in GUIDE_SETTINGS:
        flag = flags[name]
        if name in args.given:
            off = flag.off_names and not getattr(args, name)
            written.append(flag.off_names[0] if off else flag.names[-1])
        elif name in args.chosen:
            written.append(flag.variable)
    return written


def generation_config(args: argparse.Namespace, *, ignore_eos: bool = False) -> GenerationConfig:
    """Make the generation's config from resolved flags."""
    return GenerationConfig(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=ignore_eos,
    )
