"""The whole command line on the default model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kairox_jax.cli import main

ROOT = Path(__file__).parents[1]
PROMPT = "The capital of France is"
# transformers' greedy tokens for this prompt and checkpoint.
GREEDY_IDS = [7042, 30, 198, 198, 504, 2988]


def kairox(*words: str, prompt: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kairox_jax.cli", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=prompt,
        capture_output=True,
        text=True,
    )


@pytest.mark.model
def test_json_holds_the_reference_tokens_and_the_statistics(default_model: Path):
    done = kairox(
        "generate", "--json", "-n", "6", "--temperature", "0", "--mode", "dense", prompt=f"{PROMPT}\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    record = json.loads(done.stdout)
    assert record["token_ids"] == GREEDY_IDS
    assert record["finish_reason"] == "length"
    assert (record["prompt_tokens"], record["generated_tokens"]) == (5, 6)
    needed = {"hit_rate", "resident", "promotions", "evictions", "wasted_promotions", "link_bytes"}
    needed |= {"t_gpu_ms", "t_io_ms", "t_cpu_ms", "prefill_tokens_per_s", "decode_tokens_per_s"}
    assert needed | {"device", "mode", "policy", "budget"} <= set(record)
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("kairox: ") for line in lines), done.stderr


@pytest.fixture
def here(monkeypatch, capsys):
    """The command line in this process: what it sets for JAX's start must not outlive the test."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "1")

    def run(*words: str) -> tuple[int, str, str]:
        status = main(words)
        return status, *capsys.readouterr()

    return run


@pytest.mark.model
def test_a_prompt_longer_than_the_context_gives_both_counts(default_model: Path, here):
    status, out, err = here("generate", "-p", "word" + " word" * 39, "-c", "16", "--mode", "dense", "--quiet")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert "40 tokens" in err and "16" in err


@pytest.mark.model
def test_dry_run_refuses_a_budget_below_the_dense_part_and_shows_the_plan(default_model: Path, here):
    status, _, err = here("generate", "--dry-run", "--vram-budget", "1MB")
    assert status == 2
    assert err.startswith("kairox: error: ") and "dense weights" in err
    status, out, err = here("generate", "--dry-run", "--vram-budget", "2GB", "--json")
    assert (status, err) == (0, "")
    plan = json.loads(out)
    assert plan["total"] <= plan["limit"] == 2 * 10**9
