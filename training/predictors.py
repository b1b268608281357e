"""`kairox train-predictors`: train a predictor for each layer on text; write them, a report and a plot.

python -m training.predictors smollm2-135m --out checkpoints/smollm2-135m
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kairox_jax import cli
from kairox_jax.io import Checkpoint, open_checkpoint, save_predictors
from training.predictor_data import READS, write_json
from training.predictor_report import describe, plot, table
from training.predictor_trainer import Trainer
from training.products import PRODUCTS
from training.sources import KINDS, Document, builtin_documents, user_documents
from training.texts import SPLITS, Windows, cut_windows


def check(options: argparse.Namespace) -> None:
    """Check the options' values.

    Raises:
        ValueError: one is out of range.
    """
    least = {
        "windows": 1,
        "held": 1,
        "window": 8,
        "batch": 1,
        "steps": 1,
        "fit_batch": 1,
        "every": 1,
        "patience": 1,
        "seed": 0,
        "distil_steps": 0,
        "distil_batch": 1,
        "distil_every": 1,
    }
    for name, limit in least.items():
        if getattr(options, name) < limit:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least {limit}")
    for name, example in (("rate", "3e-3"), ("distil_rate", "3e-4")):
        value = getattr(options, name)
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"--{name.replace('_', '-')} {value} must be above zero, such as {example}")
    if options.start is not None and not options.distil_steps:
        raise ValueError("--start goes on with training all layers together: give --distil-steps above 0")
    if options.distil_shares and not options.distil_steps:
        raise ValueError("--distil-shares is for training all layers together: give --distil-steps above 0")
    if options.input is not None and options.input not in READS:
        raise ValueError(f"--input {options.input} is not one of {', '.join(READS)}")
    if options.products not in PRODUCTS:
        raise ValueError(f"--products {options.products} is not one of {', '.join(PRODUCTS)}")
    for name in ("bytes", "share", "recall"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1:
            raise ValueError(f"--{name} {value} must be between 0 and 1")
    for kind, value in (options.distil_shares or {}).items():
        if kind not in KINDS or not 0 < value < 1:
            raise ValueError(
                f"--distil-shares {kind}={value} is no kind of {', '.join(KINDS)} with a share between 0 and 1"
            )
    if options.max_loss is not None and not (np.isfinite(options.max_loss) and options.max_loss > 0):
        raise ValueError(f"--max-loss {options.max_loss} must be above zero: nats per token, such as 0.1")
    if options.text_only and not options.text:
        raise ValueError("--text-only leaves no text: name files after the model")
    if options.share is None and options.recall is None and options.max_loss is None:
        options.share = 0.54


def read_windows(options: argparse.Namespace, source: Checkpoint) -> dict[str, Windows]:
    """Cut the windows of every split.

    Raises:
        ValueError: a file cannot be read, or there is too little text.
    """
    documents: list[Document] = user_documents([Path(path) for path in options.text])
    if not options.text_only:
        documents += builtin_documents()
    tokenizer = source.tokenizer()
    return {
        split: cut_windows(
            documents,
            lambda text: tokenizer.encode(text, add_bos=False),
            split,
            per_kind=options.windows if split == "calibration" else options.held,
            tokens=options.window,
            bos_id=source.config.bos_id if source.config.add_bos else None,
        )
        for split in SPLITS
    }


def run(options: argparse.Namespace) -> int:
    """Train predictors for ``options.model``, write all files, print a table; return 0.

    Raises:
        ValueError: an option, a text or the model does not do.
    """
    begin = time.monotonic()
    check(options)
    options.out = Path(options.out)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file: give a folder")
    source = open_checkpoint(options.model)
    windows = read_windows(options, source)
    trainer = Trainer(source, windows, options)
    predictors, choice, fitted = trainer.run()
    meta, report = describe(predictors, choice, fitted, source, windows, options, trainer.given)
    predictors = replace(predictors, meta=meta)
    report |= trainer.test(predictors)
    report["seconds"] = round(time.monotonic() - begin, 1)
    path = save_predictors(options.out, predictors)
    write_json(options.out / "predictors_report.json", report)
    drawn = plot(report, options.out / "predictors_report.png")
    shutil.rmtree(trainer.work)
    print(table(report))
    note = "" if drawn else "; no plot without matplotlib: pip install 'kairox-jax[lab]'"
    print(f"kairox: wrote {path}{note}", file=sys.stderr)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kairox train-predictors`; return its exit status."""
    return cli.main(["train-predictors", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
