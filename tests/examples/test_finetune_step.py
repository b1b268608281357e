"""The example that trains one step; and an NNX state taken out, sharded, saved and restored."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.finetune_step import train_step
from kairox_jax import load_model

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests/data/models"


def test_one_step_is_gradient_descent() -> None:
    model = load_model(MODELS / "relu-llama")
    ids = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 12)))
    rate = 0.05
    trained, before, after = train_step(model, ids, rate)
    assert after < before
    # The loss written out here, its slope by finite differences along one weight's gradient.
    start = np.asarray(model.out_norm[...])
    moved = np.asarray(nnx.to_pure_dict(trained)["out_norm"])
    gradient = (start - moved) / rate

    def loss(scale: np.ndarray) -> float:
        model.out_norm = nnx.Param(jnp.asarray(scale))
        logits = np.asarray(model(ids), np.float64)[:, :-1]
        chosen = np.take_along_axis(logits, np.asarray(ids)[:, 1:, None], -1)[..., 0]
        top = logits.max(-1)
        return float((np.log(np.exp(logits - top[..., None]).sum(-1)) + top - chosen).mean())

    assert loss(start) == pytest.approx(before, rel=1e-5)
    step = 1e-2 * gradient / np.linalg.norm(gradient)
    slope = (loss(start + step) - loss(start - step)) / (2 * 1e-2)
    assert slope == pytest.approx(np.linalg.norm(gradient), rel=0.01)


SHARDED = """
import sys, jax, numpy as np, orbax.checkpoint as ocp
from flax import nnx
from kairox_jax import load_model
assert len(jax.devices()) == 2
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("neurons",))
model = load_model(sys.argv[1])
graph, params, rest = nnx.split(model, nnx.Param, ...)

def sharding(path, value):
    last = [str(key) for key in path if isinstance(key, str)][-1]
    spec = ("neurons",) if last in ("w_gate", "w_up", "w_down") else ()
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

flat = nnx.to_flat_state(params)
pure = {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}
shardings = {"/".join(map(str, path)): sharding(path, leaf) for path, leaf in flat}
sharded = {name: jax.device_put(value, shardings[name]) for name, value in pure.items()}
up = next(name for name in sharded if name.endswith("w_up"))
assert {s.data.shape[0] for s in sharded[up].addressable_shards} == {model.config.num_neurons // 2}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(sys.argv[2], sharded)
with ocp.StandardCheckpointer() as checkpointer:
    target = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=shardings[n]) for n, v in pure.items()}
    restored = checkpointer.restore(sys.argv[2], target)
for name, value in pure.items():
    assert restored[name].sharding == shardings[name], name
    np.testing.assert_array_equal(np.asarray(restored[name]), np.asarray(value))
state = nnx.from_flat_state([(path, leaf.replace(restored["/".join(map(str, path))])) for path, leaf in flat])
again = nnx.merge(graph, state, rest)
ids = np.arange(10)[None]
got, want = np.asarray(again(ids)), np.asarray(model(ids))
assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
print("ok")
"""


def test_a_state_is_sharded_saved_and_restored(tmp_path: Path) -> None:
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    env["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-c", SHARDED, str(MODELS / "relu-llama"), str(tmp_path / "state")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_learns_its_text(default_model: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "examples/finetune_step.py"), "--model", str(default_model)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    words = done.stdout.replace(",", "").split()
    assert float(words[words.index("after") + 3]) < float(words[words.index("before") + 1])
