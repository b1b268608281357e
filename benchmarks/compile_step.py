"""Compile the decode step's programs for a GPU that is not there: ``python -m benchmarks.compile_step [--json]``.

Prints each program's memory and the order of its thunks, which shows whether the host's work stands between the
launch of the residents and the wait for them. Needs JAX's CUDA plugin (exit 3 without), but no GPU and no driver.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHIPS = {
    # arch: name, capability, cores, shared bytes a core and a block, threads a core, L2 bytes, memory bytes, GB/s, GHz
    "sm_86": ("NVIDIA GeForce RTX 3090", 8, 6, 82, 102400, 101376, 1536, 6291456, 25769803776, 936, 1.70),
    "sm_89": ("NVIDIA GeForce RTX 4090", 8, 9, 128, 102400, 101376, 1536, 75497472, 25387925504, 1008, 2.52),
    "sm_90": ("NVIDIA H200", 9, 0, 132, 233472, 232448, 2048, 52428800, 150754820096, 4800, 1.98),
}
CALLBACK = "kairox_host_callback"
SLOTS, CONTEXT = 4096, 256
LAYERS, WIDTH, NEURONS, HEADS = 1, 4096, 11008, 32  # of a 7B model


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """One row of the report.

    Attributes:
        program: what was compiled.
        arch: for which chip.
        argument_bytes, temporary_bytes, alias_bytes: its memory; aliased are the outputs in donated arguments.
        thunks: kinds and names in the order of execution.
        overlaps: of a program with host work: it stands between the residents' start and the wait for them.
    """

    program: str
    arch: str
    argument_bytes: int
    temporary_bytes: int
    alias_bytes: int
    thunks: list[str]
    overlaps: bool | None = None


def plugin_missing() -> str | None:
    """Return why the CUDA plugin cannot be used, or None."""
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in names):
        return "JAX's CUDA plugin is not installed: pip install 'jax[cuda12]' (no GPU is needed)"
    return None


def compile_programs(arch: str, dump: Path, implementation: str) -> list[CompiledProgram]:
    """Compile every program for a chip; ``prepare`` must have run before JAX was imported."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("", "cuda", target_config=target_config(arch), topology="1x1x1")
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    found = []
    for name, (program, arguments) in programs(jax, implementation).items():
        placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
        before = set(dump.glob("*thunk_sequence.txt"))
        with abstract_gpu(jax, arch):
            compiled = program(placed).compile()
        memory = compiled.memory_analysis()
        files = set(dump.glob("*thunk_sequence.txt")) - before
        text = max(files, key=lambda path: path.stat().st_mtime).read_text() if files else ""
        thunks = read_thunks(text)
        found.append(
            CompiledProgram(
                program=name, arch=arch, argument_bytes=memory.argument_size_in_bytes,
                temporary_bytes=memory.temp_size_in_bytes, alias_bytes=memory.alias_size_in_bytes,
                thunks=thunks, overlaps=overlaps(thunks) if name.startswith("layer") else None,
            )
        )  # fmt: skip
    return found


def programs(jax: Any, implementation: str) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """Return, by name, a function that lowers a program for CUDA, and the shapes of its arguments."""
    import jax.numpy as jnp
    from flax import nnx

    from kairox_jax.config import ModelConfig
    from kairox_jax.engine.jitted_step import layer_program
    from kairox_jax.engine.programs import front_program, resident_program, split_module
    from kairox_jax.models import Attention, Norm, empty_cache
    from kairox_jax.models.load import abstract

    config = ModelConfig(
        family="llama", num_layers=LAYERS, d_model=WIDTH, num_neurons=NEURONS, num_heads=HEADS,
        num_kv_heads=HEADS, head_dim=WIDTH // HEADS, vocab_size=32000, context_length=CONTEXT, activation="relu",
    )  # fmt: skip
    split = split_module(abstract(lambda: Attention(config, rngs=nnx.Rngs(0))))
    shape = jax.ShapeDtypeStruct
    x, start = shape((1, WIDTH), jnp.float32), shape((1,), jnp.int32)
    norm = Norm(shape((WIDTH,), jnp.float32), None)
    cache = jax.eval_shape(lambda: empty_cache(config, batch=1, length=CONTEXT))
    slots = (shape((SLOTS, WIDTH), jnp.float32),) * 3
    residents = (slots, None, None, shape((SLOTS,), jnp.bool_), None, shape((), jnp.float32))
    front = front_program(split.rebuild, config)
    resident = resident_program("relu", implementation, platform="cuda")
    layer = layer_program(front, resident, host_stand_in(jax), second_stream=implementation == "xla")
    ids, number = shape((NEURONS,), jnp.int32), shape((), jnp.int32)
    front_arguments = (split.leaves, norm, x, x, x, start, None, cache)
    layer_arguments = ((split.leaves, norm, None), x, start, None, cache, residents, ids, number, number)

    def lowered(program: Any, **static: Any) -> Callable[[Any], Any]:
        return lambda arguments: program.trace(*arguments, **static).lower(lowering_platforms=("cuda",))

    return {
        "front": (lowered(front, attend=CONTEXT), front_arguments),
        "residents": (lowered(resident), (*residents, x)),
        "layer with host callback": (lowered(layer, attend=CONTEXT), layer_arguments),
    }


def host_stand_in(jax: Any) -> Callable[..., tuple[Any, Any]]:
    """Return a host callback that XLA can compile without a client: JAX's own ones need a device to be lowered."""
    import numba

    from kairox_jax.host.ffi_handler import make_handler

    @numba.njit
    def nothing(frame: Any) -> None:
        pass

    jax.ffi.register_ffi_target(CALLBACK, make_handler(nothing), platform="CUDA")

    def call(x: Any, ids: Any, n: Any, layer: Any) -> tuple[Any, Any]:
        active = jax.ShapeDtypeStruct((x.shape[0], ids.shape[0]), "uint8")
        y, fired = jax.ffi.ffi_call(CALLBACK, (x, active))(x, ids, n, layer)
        return y, fired

    return call


def abstract_gpu(jax: Any, arch: str) -> contextlib.AbstractContextManager[Any]:
    """Name a device for the lowering: from jax 0.11 on, Pallas-Triton asks which one."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(CHIPS[arch][0], 1, "cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def read_thunks(text: str) -> list[str]:
    """Return kind and name of each thunk of a dumped sequence, in order."""
    found = re.findall(r"^\s*\d+:\s*(k\w+)\s*(?:\[[^\]]*\])?[ \t]*(.*)$", text, re.MULTILINE)
    return [f"{kind[1:]} {detail.strip()}"[:160].strip() for kind, detail in found]


def overlaps(thunks: list[str]) -> bool:
    """Say whether the host is called between the start of another stream's work and the wait for it."""
    calls = [at for at, thunk in enumerate(thunks) if thunk.startswith("CustomCall")]
    starts = {_async_id(thunk): at for at, thunk in enumerate(thunks) if thunk.startswith("AsyncStart")}
    ends = {_async_id(thunk): at for at, thunk in enumerate(thunks) if thunk.startswith("AsyncDone")}
    return any(start < call < ends.get(key, -1) for key, start in starts.items() for call in calls)


def _async_id(thunk: str) -> str:
    found = re.search(r"async_id=(\d+)", thunk)
    return found[1] if found else ""


def target_config(arch: str) -> str:
    """Return XLA's description of a chip."""
    name, major, minor, cores, shared, optin, threads, l2, memory, bandwidth, ghz = CHIPS[arch]
    return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}000000000 l2_cache_size: {l2} clock_rate_ghz: {ghz} device_memory_size: {memory}
  shared_memory_per_block_optin: {optin} cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}\""""


def prepare(dump: str) -> None:
    """Set what XLA reads when it starts: no tuning, which needs a device, and a dump of each program."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = f"--xla_gpu_autotune_level=0 --xla_dump_to={dump} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_step", description=__doc__)
    parser.add_argument("--arch", choices=sorted(CHIPS), default="sm_89")
    parser.add_argument("--implementation", choices=("pallas", "triton", "xla"), default="pallas")
    parser.add_argument("--json", action="store_true", help="print a list of objects, not text")
    args = parser.parse_args(argv)
    missing = plugin_missing()
    if missing:
        print(missing, file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as dump:
        prepare(dump)
        found = compile_programs(args.arch, Path(dump), args.implementation)
    if args.json:
        print(json.dumps([vars(program) for program in found], indent=1))
        return 0
    for program in found:
        print(f"{program.program} ({program.arch}): arguments {program.argument_bytes / 1e6:.1f} MB, temporaries "
              f"{program.temporary_bytes / 1e6:.2f} MB, aliased {program.alias_bytes / 1e6:.1f} MB"
              + ("" if program.overlaps is None else f", host beside residents: {program.overlaps}"))  # fmt: skip
        print("\n".join(f"  {thunk}" for thunk in program.thunks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
