"""`kairox sparsify --relu`: distil a SiLU model into a ReLU model, layer by layer, then on its logits.

Goes on from its last checkpoint when it is started again; the order of the text depends on the step alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from kairox_jax.io import fingerprint, open_checkpoint
from kairox_jax.models import load_decoder
from training.choose import rises
from training.forward import LayeredModel, layered
from training.measure import Measurement, evaluate
from training.relufy_save import check_savable, save_folder
from training.relufy_student import (
    Params,
    Student,
    as_layered,
    first_params,
    make_student,
    to_host,
    train_step,
)
from training.report import installed_versions
from training.texts import Windows, summary
from training.thresholds import read_windows

STAGES = ("layers", "logits")
WARM_UP_FRAC = 0.05
CURVE_POINTS = 100  # of the report
TEST_WINDOWS = 8  # of each kind, on which three models are measured


@dataclass(frozen=True)
class Plan:
    """Steps and settings that decide where a run ends; a checkpoint of another plan is refused.

    Attributes:
        steps: of the two stages.
        rank, learning_rate, batch, seed: as the flags.
        model: fingerprint of the teacher.
        texts: digest of the windows trained on.
    """

    steps: tuple[int, int]
    rank: int
    learning_rate: float
    batch: int
    seed: int
    model: str
    texts: str

    def stage_of(self, step: int) -> str:
        """Return the stage of a step, counted over both."""
        return STAGES[int(step >= self.steps[0])]

    def rows(self, step: int, windows: int) -> np.ndarray:
        """Return the windows of a step: a new order of all of them each time they have been used up."""
        first = step * self.batch
        places = np.arange(first, first + self.batch)
        epochs = {int(epoch) for epoch in places // windows}
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(windows) for epoch in epochs}
        return np.array([orders[place // windows][place % windows] for place in map(int, places)])


def check_options(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for settings that cannot be carried out."""
    if options.steps < 0 or options.logit_steps < 0 or options.steps + options.logit_steps < 1:
        raise ValueError(
            f"--steps {options.steps} and --logit-steps {options.logit_steps}: take one step or more"
        )
    if not (np.isfinite(options.learning_rate) and options.learning_rate > 0):
        raise ValueError(f"--learning-rate {options.learning_rate} must be above zero, such as 3e-4")
    if options.rank < 0:
        raise ValueError(f"--rank {options.rank} must be 0 (the whole FFN) or more")
    if options.text_only and not options.text:
        raise ValueError("--text-only leaves no text: name files with --text")


def make_optimiser(plan: Plan, stage: str) -> Any:
    """Return AdamW with a warm-up and a cosine decay over the stage."""
    optax = import_module("optax")
    steps = max(plan.steps[STAGES.index(stage)], 1)
    warm_up = max(1, int(WARM_UP_FRAC * steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, plan.learning_rate, warm_up, max(steps, warm_up + 1))
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.0))


@dataclass
class Progress:
    """What a checkpoint holds: parameters, the optimiser's state, the next step, and the curve so far."""

    params: Params
    state: Any
    step: int
    curve: list[dict[str, Any]]


def train(
    student: Student,
    windows: Windows,
    plan: Plan,
    folder: Path,
    *,
    save_every: int,
) -> Iterator[Progress]:
    """Train, yielding after each step; saves every ``save_every`` steps and at the end, and goes on from there.

    Raises:
        ValueError: a loss that is not finite, or checkpoints of another plan.
    """
    first = first_params(student, plan.rank, plan.seed)
    start = Progress(first, make_optimiser(plan, plan.stage_of(0)).init(first), 0, [])
    done = _restore(folder, plan, start) or start
    total, optimisers = sum(plan.steps), {stage: make_optimiser(plan, stage) for stage in STAGES}
    while done.step < total:
        stage = plan.stage_of(done.step)
        if done.step == plan.steps[0] and done.step > 0:
            done.state = optimisers[stage].init(done.params)
        ids = jnp.asarray(windows.ids[plan.rows(done.step, len(windows.ids))])
        done.params, done.state, figures = train_step(
            student, done.params, done.state, ids, stage=stage, optimiser=optimisers[stage]
        )
        row = {"step": done.step, "stage": stage} | {name: float(value) for name, value in figures.items()}
        if not np.isfinite(row["error"]):
            raise ValueError(
                f"the loss of step {done.step} ({stage}) is NaN or infinite: lower --learning-rate and start again in "
                "a new folder"
            )
        done.curve.append(row)
        done.step += 1
        if done.step % save_every == 0 or done.step == total:
            _save(folder, plan, done)
        yield done


def _checkpointer() -> Any:
    return import_module("orbax.checkpoint").PyTreeCheckpointer()


def _facts(plan: Plan) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(plan).items()}


def _save(folder: Path, plan: Plan, done: Progress) -> None:
    """Write a checkpoint beside the last one, then remove that."""
    target = (folder / f"step-{done.step}").absolute()
    shutil.rmtree(target, ignore_errors=True)
    leaves = jax.tree.leaves((done.params, done.state))
    _checkpointer().save(target / "arrays", {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)})
    text = json.dumps({"plan": _facts(plan), "step": done.step, "curve": done.curve})
    (target / "progress.json").write_text(text, encoding="utf-8")  # last: a folder without it is not complete
    for old in folder.glob("step-*"):
        if old.name != target.name:
            shutil.rmtree(old)


def _restore(folder: Path, plan: Plan, like: Progress) -> Progress | None:
    found = [path for path in folder.glob("step-*") if (path / "progress.json").is_file()]
    if not found:
        return None
    last = max(found, key=lambda path: int(path.name.removeprefix("step-")))
    facts = json.loads((last / "progress.json").read_text(encoding="utf-8"))
    if facts["plan"] != _facts(plan):
        other = [name for name, value in _facts(plan).items() if facts["plan"].get(name) != value]
        raise ValueError(
            f"{folder} holds checkpoints of another run (different: {', '.join(other)}): give another --out, or remove "
            "the folder to start again"
        )
    arrays = _checkpointer().restore((last / "arrays").absolute())
    leaves, structure = jax.tree.flatten((like.params, like.state))
    values = [jnp.asarray(arrays[str(i)], leaf.dtype) for i, leaf in enumerate(leaves)]
    params, state = jax.tree.unflatten(structure, values)
    return Progress(params, state, facts["step"], facts["curve"])


def run(options: argparse.Namespace) -> int:
    """Run the command: train, save the model, report; return 0.

    Raises:
        ValueError: settings, text or a model that cannot be used.
    """
    start = time.monotonic()
    check_options(options)
    _check_installed()
    source = open_checkpoint(options.model)
    check_savable(source)
    windows = read_windows(options, source)
    model = layered(load_decoder(source))
    student = make_student(model)
    plan = Plan(
        steps=(options.steps, options.logit_steps),
        rank=options.rank,
        learning_rate=options.learning_rate,
        batch=options.batch,
        seed=options.seed,
        model=fingerprint(source),
        texts=json.dumps(summary(windows["calibration"]), sort_keys=True),
    )
    done = None
    with tqdm(total=sum(plan.steps), desc="distil", unit="step", file=sys.stderr) as bar:
        for done in train(
            student, windows["calibration"], plan, options.out / "checkpoints", save_every=options.save_every
        ):
            bar.update(done.step - bar.n)
            bar.set_postfix({name: f"{done.curve[-1][name]:.3f}" for name in ("error", "active")})
    if done is None:
        done = _restore(
            options.out / "checkpoints",
            plan,
            Progress(first_params(student, plan.rank, plan.seed), (), 0, []),
        )
        assert done is not None
    report = describe(model, student, done, windows["test"].first(TEST_WINDOWS), options) | {
        "seconds": round(time.monotonic() - start, 1)
    }
    save_folder(options.out / "model", source, to_host(student, done.params))
    report |= {"fingerprint": plan.model, "texts": {split: summary(w) for split, w in windows.items()}}
    report["versions"] = installed_versions()
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(report)))
    print(f"written: {options.out / 'model'} (runs as a model of its own), {options.out / 'report.json'}")
    return 0


def _check_installed() -> None:
    for name in ("optax", "orbax.checkpoint"):
        try:
            import_module(name)
        except ImportError:
            raise ValueError(f"--relu needs {name}: install kairox with the extra 'train'") from None


def describe(
    model: LayeredModel, student: Student, done: Progress, test: Windows, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure the ReLU model on text of its own, beside the teacher and beside ReLU without training."""

    def measure(some: LayeredModel) -> Measurement:
        return evaluate(some, test, None, batch=options.batch, tick=lambda work: None)

    dense = measure(model)
    untrained = measure(as_layered(model, student, first_params(student, 0, 0)))
    trained = measure(as_layered(model, student, done.params))
    losses = {}
    for kind, (rise, error) in rises(dense, trained, test).items():
        losses[kind] = {
            "dense": round(dense.loss(test, kind), 4),
            "relu": round(trained.loss(test, kind), 4),
            "rise": round(rise, 4),
            "standard_error": round(error, 4),
            "active_frac": round(trained.active_frac(kind), 4),
            "untrained": round(untrained.loss(test, kind), 4),
        }
    keep = np.unique(np.linspace(0, len(done.curve) - 1, min(CURVE_POINTS, len(done.curve))).astype(int))
    return {
        "model": Path(options.model).name,
        "steps": {"layers": options.steps, "logits": options.logit_steps},
        "rank": options.rank,
        "learning_rate": options.learning_rate,
        "batch": options.batch,
        "window": options.window,
        "losses": losses,
        "curve": [done.curve[i] for i in keep],
    }


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the losses as lines."""
    yield "kind   dense   ReLU untrained  ReLU distilled  rise              active"
    for kind, row in report["losses"].items():
        yield (
            f"{kind:5}  {row['dense']:5.3f}  {row['untrained']:14.3f}  {row['relu']:14.3f}  "
            f"{row['rise']:+.3f} +- {row['standard_error']:.3f}  {row['active_frac']:7.1%}"
        )
