"""`kairox generate` over a stand-in engine: streams, statuses, prompts, flags and variables."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fake import FakeApi

from kairox_jax.cli import main

ROOT = Path(__file__).parents[1]
FAKE = [sys.executable, str(ROOT / "tests" / "cli_fake.py")]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KAIROX_") and name != "KAIROX_CACHE"]:
        monkeypatch.delenv(name)
    # What the command line sets for JAX must not outlive a test.
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "1")


def generate(capsys, *words: str, api: FakeApi | None = None) -> tuple[int, str, str, FakeApi]:
    api = api or FakeApi()
    status = main(["generate", *words], engine_api=api)
    out, err = capsys.readouterr()
    return status, out, err, api


def pipe(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_text_on_stdout_and_two_lines_on_stderr(capsys):
    status, out, err, api = generate(capsys, "-p", "hi")
    assert status == 0
    assert out == "Grüße, 👋!\n"
    assert err == "kairox: fake device, everything in one place\nkairox: 9 tokens\n"
    assert api.closed == 1
    assert api.requests[0][0] == "hi"


def test_quiet_leaves_stderr_empty(capsys):
    assert generate(capsys, "-p", "hi", "--quiet")[2] == ""


def test_json_is_one_object_and_nothing_else(capsys):
    status, out, _, api = generate(capsys, "-p", "hi", "--json", "-n", "3")
    assert status == 0 and api.closed == 1
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "text": "Grü",
        "prompt_token_ids": [104, 105],
        "token_ids": [71, 114, 252],
        "finish_reason": "length",
        "stats": None,
        "generated_tokens": 3,
        "hit_rate": 0.5,
        "predictor_recall": None,
    }


def test_every_flag_reaches_the_engine(capsys, tmp_path):
    words = (
        "-m other.gguf -n 7 -c 99 -t 3 --temperature 0.5 --top-k 9 --top-p 0.8 --min-p 0.1 --seed 42".split()
    )
    words += "--stop A --stop B --ignore-eos --mode exact --policy guide --vram-budget 6GiB".split()
    words += "--sparsity folder --predictors forecasts --slot-format packed --emulated-link 1GB/s,5us".split()
    words += "--gpu-cache-neurons 5 --tam-beta 0.7 --tam-threshold 0.6 --tam-evict 0.2 --no-anb".split()
    words += "--host-callback ffi".split()
    trace = str(tmp_path / "trace.npz")
    status, _, _, api = generate(capsys, "-p", "hi", *words, "--trace-out", trace)
    assert status == 0
    model, settings = api.opened[0]
    placement = settings.pop("placement")
    assert model == "other.gguf"
    assert settings == {
        "mode": "exact",
        "context_length": 99,
        "threads": 3,
        "sparsity": "folder",
        "predictors": "forecasts",
    }
    assert vars(placement) | {"max_moves": None} == {
        "vram_budget_bytes": 6 * 2**30,
        "gpu_cache_neurons": 5,
        "policy": "guide",
        "slot_format": "packed",
        "tam_beta": 0.7,
        "tam_threshold": 0.6,
        "tam_evict": 0.2,
        "anb_enable": False,
        "max_moves": None,
        "emulated_link": "1GB/s,5us",
        "host_callback": "ffi",
        "host_activations": "float32",
    }
    _, config, sent_trace = api.requests[0]
    assert sent_trace == trace
    assert vars(config) == {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "seed": 42,
        "stop": ("A", "B"),
        "ignore_eos": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
    }


def test_host_activations_by_flag_and_by_variable(capsys, monkeypatch):
    by_flag = generate(capsys, "--prompt", "hi", "--host-activations", "int8")[3]
    monkeypatch.setenv("KAIROX_HOST_ACTIVATIONS", "int8")
    by_variable = generate(capsys, "--prompt", "hi")[3]
    for api in (by_flag, by_variable):
        assert api.opened[0][1]["placement"].host_activations == "int8"


@pytest.mark.parametrize("name", ["-n", "--max-tokens", "--n-predict"])
def test_long_and_short_names(capsys, name):
    assert generate(capsys, "--prompt", "hi", name, "2")[1] == "Gr\n"


def test_variables_and_that_flags_win(capsys, monkeypatch):
    for name, value in {
        "MODEL": "from-variable",
        "SEED": "5",
        "TOP_K": "3",
        "ANB_ENABLE": "0",
        "STOP": "END",
        "IGNORE_EOS": "yes",
        "PROMPT": "from variable",
    }.items():
        monkeypatch.setenv(f"KAIROX_{name}", value)
    _, _, _, api = generate(capsys, "--seed", "6")
    assert api.opened[0][0] == "from-variable"
    assert not api.opened[0][1]["placement"].anb_enable
    prompt, config, _ = api.requests[0]
    assert prompt == "from variable"
    assert (config.seed, config.top_k, config.stop, config.ignore_eos) == (6, 3, ("END",), True)
    _, _, _, api = generate(capsys, "-p", "flag", "--anb-enable")
    assert api.requests[0][0] == "flag"
    assert api.opened[0][1]["placement"].anb_enable


def test_a_flag_of_guide_chooses_it(capsys, monkeypatch):
    def chosen(*words: str) -> str:
        return generate(capsys, "-p", "a", *words)[3].opened[0][1]["placement"].policy_name

    assert chosen() == chosen("--mode", "dense") == "split"
    assert chosen("--tam-beta", "0.9") == chosen("--anb-enable") == chosen("--no-anb") == "guide"
    assert chosen("--policy", "lru") == "lru"
    monkeypatch.setenv("KAIROX_TAM_BETA", "0.9")
    assert chosen() == "guide"


@pytest.mark.parametrize(
    ("words", "variable", "message"),
    [
        (
            "--policy static --tam-beta 0.9",
            None,
            "--tam-beta has no effect with --policy static: leave it out",
        ),
        (
            "--policy static --tam-beta 0.5",
            None,
            "--tam-beta has no effect with --policy static: leave it out",
        ),
        ("--policy lru --anb-enable", None, "--anb-enable has no effect with --policy lru"),
        ("--policy lru --no-anb", None, "--no-anb has no effect with --policy lru"),
        ("--policy split", "TAM_EVICT=0.08", "KAIROX_TAM_EVICT has no effect with --policy split"),
        ("--tam-beta 0.9", "POLICY=split", "--tam-beta has no effect with --policy split"),
        ("--mode dense --tam-beta 0.9 --no-anb", None, "no effect with --mode dense: --tam-beta, --no-anb;"),
        ("--mode dense --policy guide --anb-enable", None, "no effect with --mode dense: --anb-enable;"),
        ("--policy best --tam-beta 0.9", None, "policy 'best' is unknown: choose one of"),
    ],
)
def test_a_flag_of_guide_is_refused_beside_another_policy_at_any_value(
    capsys, monkeypatch, words, variable, message
):
    if variable:
        name, value = variable.split("=")
        monkeypatch.setenv(f"KAIROX_{name}", value)
    status, _, err, api = generate(capsys, "-p", "a", *words.split())
    assert status == 2 and message in err and err.count("\n") == 1 and not api.opened


def test_a_flag_of_guide_stands_beside_its_name(capsys):
    words = "--policy guide --tam-beta 0.9 --no-anb".split()
    placement = generate(capsys, "-p", "a", *words)[3].opened[0][1]["placement"]
    assert (placement.policy_name, placement.anb_enable) == ("guide", False)


def test_an_empty_path_is_refused(capsys):
    for flag, kind in (("--sparsity", "folder"), ("--trace-out", "file")):
        status, _, err, _ = generate(capsys, "-p", "hi", flag, "")
        told = f"{flag}: the value is empty: name a {kind}, or leave it out"
        assert (status, err) == (2, f"kairox: error: {told}\n")


def test_bad_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("KAIROX_SEED", "x")
    status, _, err, _ = generate(capsys, "-p", "hi")
    assert (status, err) == (2, "kairox: error: KAIROX_SEED: 'x' is not a whole number\n")
    assert generate(capsys, "-p", "hi", "--seed", "1")[0] == 0


def test_prompt_sources(capsys, monkeypatch, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n\n")
    assert generate(capsys, "-f", str(file))[3].requests[0][0] == "from a file\n"
    for words in ([], ["-p", "-"], ["-f", "-"]):
        pipe(monkeypatch, "über\r\n".encode())
        assert generate(capsys, *words)[3].requests[0][0] == "über"
    monkeypatch.setenv("KAIROX_PROMPT", "variable")
    assert generate(capsys, "-f", str(file))[3].requests[0][0] == "from a file\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-f", "missing.txt"], "missing.txt: No such file or directory; check the path"),
        (["-p", "a", "-f", "b"], "-p and -f both give a prompt"),
        (["-p", "a\udcff"], "-p is not UTF-8"),
        (["-p", "a", "--temperature", "-1"], "temperature -1.0 must be 0 or more"),
        (["-p", "a", "--temperature", "nan"], "temperature nan must be"),
        (["-p", "a", "--top-k", "many"], "--top-k: 'many' is not a whole number"),
        (["-p", "a", "-n", "-1"], "max_tokens -1 must not be negative"),
        (["-p", "a", "--threads", "0"], "-t/--threads: '0' must be 1 or more"),
        (["-p", "a", "-c", "0"], "-c/--ctx-size: '0' holds no prompt and answer: give at least 2 tokens"),
        (["-p", "a", "-c", "1"], "-c/--ctx-size: '1' holds no prompt and answer: give at least 2 tokens"),
        (["-p", "a", "--stop", ""], "none of them empty"),
        (["-p", "a", "--mode", "fast"], "'fast' is not one of dense, exact"),
        (["-p", "a", "--vram-budget", "0"], "--vram-budget: size '0' is zero"),
        (["-p", "a", "--vram-budget=-3GB"], "--vram-budget: size '-3GB': expected a positive number"),
        (["-p", "a", "--vram-budget", "6 apples"], "--vram-budget: size '6 apples': expected"),
        (["-p", "a", "--tam-beta", "1"], "--tam-beta 1.0 must be in [0, 1)"),
        (["-p", "a", "--tam-evict", "0.5"], "--tam-evict 0.5 must be in [0, --tam-threshold 0.35]"),
        (["-p", "a", "--trace-out", "no/such/folder/t.npz"], "its folder does not exist"),
        (["-p", "a", "--top_k", "3"], "does not know '--top_k': did you mean --top-k?"),
        (["-p", "a", "b c"], "does not know 'b c': quote a text with spaces"),
        (["-p", "a", "--temp"], "expected one argument"),
        (["-p", "-x"], "as in --prompt=-x"),
        (["-p", "a", "--vram", "6GB"], "does not know '--vram'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(capsys, words, message):
    status, out, err, api = generate(capsys, *words)
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("kairox: error: ")
    assert message in err
    assert not api.opened


def test_prompt_file_that_is_not_text(capsys, tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"ab\xff")
    assert "is not UTF-8 text (byte 2)" in generate(capsys, "-f", str(file))[2]


def test_no_prompt_at_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    status, _, err, _ = generate(capsys)
    assert status == 2 and "no prompt: give -p TEXT" in err


def test_engine_errors(capsys):
    for error in (
        ValueError("model x: unknown"),
        TypeError("no"),
        OSError("disk"),
        FloatingPointError("nan"),
    ):
        status, _, err, api = generate(capsys, "-p", "hi", api=FakeApi(error=error))
        assert (status, err) == (2, f"kairox: error: {error}\n")
    status, _, err, _ = generate(capsys, "-p", "hi", api=FakeApi(error=KeyError("key")))
    assert status == 1
    assert err == "kairox: error: internal error: KeyError: 'key' (--debug shows where)\n"
    status, _, err, _ = generate(
        capsys, "-p", "hi", api=FakeApi(error=RuntimeError("RESOURCE_EXHAUSTED:\n 9GB"))
    )
    assert status == 1 and err.startswith("kairox: error: out of memory: give a smaller --vram-budget")
    assert err.count("\n") == 1


def test_a_plan_below_an_error_is_kept(capsys):
    error = ValueError("--vram-budget 1.0 MB is too small: raise it\n  dense weights 9 MB\n  slots 0 MB")
    _, _, err, _ = generate(capsys, "-p", "hi", api=FakeApi(error=error))
    assert err == f"kairox: error: {error}\n"


def test_debug_shows_the_traceback(capsys, monkeypatch):
    _, _, err, _ = generate(capsys, "-p", "hi", "--debug", api=FakeApi(error=ValueError("bad")))
    assert "Traceback" in err and err.endswith("kairox: error: bad\n")
    monkeypatch.setenv("KAIROX_DEBUG", "1")
    assert "Traceback" in generate(capsys, "-p", "hi", api=FakeApi(error=ValueError("bad")))[2]


def test_dry_run_prints_the_plan(capsys):
    status, out, _, api = generate(capsys, "--dry-run", "--vram-budget", "2GB", "-c", "512")
    assert (status, out) == (0, "dense weights  1.0 MB\nslots          2.0 MB\n")
    assert api.opened[0][1]["context_length"] == 512
    assert api.opened[0][1]["placement"].vram_budget_bytes == 2 * 10**9
    assert not api.requests
    assert json.loads(generate(capsys, "--dry-run", "--json")[1]) == {
        "dense_weights": 1_000_000,
        "slots": 2_000_000,
        "slots_per_layer": 8,
        "num_neurons": 16,
        "reason": "asked for",
    }


def test_a_misspelled_variable_is_told(capsys, monkeypatch):
    monkeypatch.setenv("KAIROX_VRAM_BUGET", "1GB")
    err = generate(capsys, "-p", "hi")[2]
    assert "nothing reads the variable KAIROX_VRAM_BUGET: did you mean KAIROX_VRAM_BUDGET?" in err


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NO_ANB", "ANB_ENABLE=0"),
        ("NO_ANB_ENABLE", "ANB_ENABLE=0"),
        ("N_PREDICT", "MAX_TOKENS"),
        ("TEMP", "TEMPERATURE"),
    ],
)
def test_a_variable_named_after_a_flag_is_told_the_flags_own(capsys, monkeypatch, name, meant):
    monkeypatch.setenv(f"KAIROX_{name}", "1")
    err = generate(capsys, "-p", "hi")[2]
    assert f"nothing reads the variable KAIROX_{name}: did you mean KAIROX_{meant}?\n" in err


def test_a_variable_of_any_other_command_is_known(capsys, monkeypatch):
    for name in ("HARDWARE", "CAPACITY", "MAX_LOSS", "PORT"):
        monkeypatch.setenv(f"KAIROX_{name}", "1")
    assert "nothing reads" not in generate(capsys, "-p", "hi")[2]


def test_warnings_and_log_lines_are_one_line():
    script = """
import logging, warnings, cli_fake, kairox_jax.cli
class Api(cli_fake.FakeApi):
    def Engine(self, *words, **settings):
        warnings.warn("slow")
        logging.getLogger("kairox").warning("no profile")
        return super().Engine(*words, **settings)
kairox_jax.cli.main(["generate", "-p", "x"], engine_api=Api())
"""
    env = {**ENV, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[:2] == ["kairox: warning: slow", "kairox: no profile"]


def test_ctrl_c_keeps_the_text_and_says_how_far_it_got():
    words = ["0.05", "abcdefghij" * 20, "generate", "-p", "x", "-n", "200"]
    with subprocess.Popen(
        [*FAKE, *words], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.read(3)
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read().decode()
        assert process.wait(10) == 130
    assert (first + rest).decode().startswith("abc") and rest.endswith(b"\n")
    assert "Traceback" not in errors
    assert errors.splitlines()[1].startswith("kairox: interrupted after ")


def test_a_reader_that_goes_away_ends_it_quietly():
    words = ["0.01", "abcdefghij" * 20, "generate", "-p", "x", "-n", "200", "--quiet"]
    with subprocess.Popen(
        [*FAKE, *words], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"a"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(10) == 141


def test_a_terminal_without_utf8_gets_replacements():
    env = {**ENV, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*FAKE, "0", "ü!", "generate", "-p", "x"], env=env, capture_output=True, check=True)
    assert done.stdout == b"?!\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        [],
        ["generate", "--help"],
        ["chat", "--help"],
        ["generate", "-p", "x", "--top-k", "many"],
        ["generate", "--no-such-flag"],
        ["generate", "-p", ""],
        ["no-such-command"],
        ["pull"],
    ],
)
def test_jax_is_not_loaded_without_need(words):
    script = (
        "import sys\nfrom kairox_jax.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'jax', 'jaxlib', 'flax', 'numba', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], env=ENV, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_every_variable(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    out = capsys.readouterr().out
    for name in (
        "MODEL",
        "PROMPT",
        "MAX_TOKENS",
        "CTX_SIZE",
        "VRAM_BUDGET",
        "ANB_ENABLE",
        "TRACE_OUT",
        "STOP",
    ):
        assert f"KAIROX_{name}]" in out


def test_unknown_command_and_no_command(capsys):
    assert main(["no-such"]) == 2
    assert "there is no command no-such: choose from generate" in capsys.readouterr().err
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
