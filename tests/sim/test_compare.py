"""The command line of replay and compare, the table, and errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from kairox_jax.cli import make_parser
from kairox_jax.commands.compare import run_compare
from kairox_jax.commands.flags import resolve
from kairox_jax.commands.replay import parse_capacity, run_replay
from kairox_jax.io.trace import read_trace
from kairox_jax.sim.compare import parse_policy
from kairox_jax.sim.priors import topic_switches

DATA = Path(__file__).parents[1] / "data" / "traces"
TRACES = [str(DATA / f"smollm2-{name}.npz") for name in ("prose", "code")]


def run(kind: str, *words: str, **environ: str) -> int:
    parser = make_parser(kind)
    args = resolve(parser.parse_args([kind, *words]), environ)
    return {"replay": run_replay, "compare": run_compare}[kind](args)


def test_replay_prints_the_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TRACES[0], "--policy", "guide", "--param", "beta=0.5", "--steps", "4", "--capacity", "100"]
    assert run("replay", *words, "--json", "--check") == 0
    shown = json.loads(capsys.readouterr().out)
    keys = {"step", "hit_rate", "promoted", "evicted", "t_gpu_ms", "t_io_ms", "t_cpu_ms", "modifier"}
    assert len(shown["steps"]) == 4 and keys <= set(shown["steps"][0])
    wanted = {"ms_per_token", "p99_ms", "hit_rate", "link_bytes", "wasted_promotions"}
    assert wanted <= set(shown["totals"]) and "neutral start" in shown["prior"]


def test_replay_parameters_matter(capsys: pytest.CaptureFixture[str]) -> None:
    promoted = []
    for beta in ("0.5", "0.95"):
        run("replay", TRACES[0], "--param", f"beta={beta}", "--steps", "4", "--json")
        promoted.append(json.loads(capsys.readouterr().out)["totals"]["promotions"])
    assert promoted[0] > promoted[1]


def test_replay_without_json_says_scale_and_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("replay", *TRACES, "--hardware", "pc-low", "--as-model", "llama-7b", "--steps", "2") == 0
    printed = capsys.readouterr()
    assert (
        "ms_per_token" in printed.out and "7.16667 neurons" in printed.err and "other traces" in printed.err
    )


def test_compare_writes_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TRACES, "--as-model", "llama-13b", "--steps", "6", "--out", str(tmp_path)]
    words += ["--policies", "static,paper:tau_filter=literal,split,oracle", "--hardware", "pc-low"]
    assert run("compare", *words) == 0
    text = capsys.readouterr().out
    split_row = next(line for line in text.splitlines() if line.startswith("split"))
    assert split_row.count("*") == 2 and text.count("*(") == 2
    summary = json.loads((tmp_path / "compare.json").read_text())
    assert len(summary["cells"]) == 8
    static = [cell["ms_per_token"] for cell in summary["cells"] if cell["policy"] == "static"]
    split = [cell["ms_per_token"] for cell in summary["cells"] if cell["policy"] == "split"]
    ratio = (static[0] / split[0] * static[1] / split[1]) ** 0.5
    assert summary["split_is_faster_by"]["static"] == pytest.approx(ratio)
    assert (tmp_path / "table.txt").read_text().startswith("ms a token")


def test_compare_takes_what_the_engine_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *TRACES,
        "--steps",
        "3",
        "--policies",
        "lru",
        "--hardware",
        "pc-high",
        "--capacity",
        "0.3",
        "--json",
    ]
    promoted = {}
    for more in ("", "--forecast=adjacent", "--forecast=previous", "--max-moves=5"):
        assert run("compare", *words, *([more] if more else [])) == 0
        promoted[more] = json.loads(capsys.readouterr().out)["cells"][0]["promotions"]
    layer_steps = 2 * 3 * 30
    assert 0 < promoted["--max-moves=5"] <= 5 * layer_steps
    assert promoted["--forecast=previous"] < promoted["--forecast=adjacent"] < promoted[""]


def test_a_topic_switch_joins_halves_and_profiles_the_rest_of_the_first() -> None:
    traces = [read_trace(path) for path in TRACES]
    (one, two), priors, note = topic_switches(traces, 10)
    assert (one.num_steps, two.num_steps) == (10, 10) and "5 steps" in note
    assert (one.name, two.name) == ("smollm2-prose-to-smollm2-code", "smollm2-code-to-smollm2-prose")
    for step in range(5):
        np.testing.assert_array_equal(one.active(step), traces[0].active(step))
        np.testing.assert_array_equal(one.active(5 + step), traces[1].active(step))
    rest = np.mean([traces[1].active(step) for step in range(5, traces[1].num_steps)], axis=0)
    assert priors[1] is not None
    np.testing.assert_allclose(priors[1], rest, rtol=1e-6)
    with pytest.raises(ValueError, match="2 traces or more"):
        topic_switches(traces[:1], None)


def test_compare_replays_topic_switches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "4", "--policies", "static", "--hardware", "pc-low", "--json", "--topic-switch"]
    assert run("compare", *TRACES, *words, "--as-model", "llama-13b") == 0
    assert "smollm2-prose-to-smollm2-code" in json.loads(capsys.readouterr().out)["traces"]


@pytest.mark.parametrize("kind", ["replay", "compare"])
def test_help_tells_defaults_and_variables(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser(kind).parse_args([kind, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for word in ("default perfect; KAIROX_FORECAST", "default 4.0; KAIROX_QUEUE_MS", "KAIROX_CAPACITY"):
        assert word in text


def test_variables_stand_in_for_flags_and_choices_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TRACES[0], "--steps", "2", "--json"]
    assert run("replay", *words, KAIROX_POLICY="lru", KAIROX_FORECAST="perfect") == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "lru"
    with pytest.raises(ValueError, match="--policy.*'best' is unknown: choose one of.*split"):
        run("replay", *words, "--policy", "best")
    with pytest.raises(ValueError, match="KAIROX_FORECAST.*'none' is unknown: choose one of adjacent"):
        run("compare", *words, KAIROX_FORECAST="none")


def test_capacity_is_slots_or_a_share() -> None:
    assert parse_capacity("500") == 500 and isinstance(parse_capacity("1"), int)
    assert parse_capacity("0.25") == 0.25 and isinstance(parse_capacity("1.0"), float)
    with pytest.raises(ValueError, match="half"):
        parse_capacity("half")


def test_policy_parameters_are_read() -> None:
    assert parse_policy("paper:tau_filter=off:decay=0.5") == ("paper", {"tau_filter": "off", "decay": 0.5})
    with pytest.raises(ValueError, match="name=value"):
        parse_policy("paper:off")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plots"], "--out"),
        (["--capacity", "some"], "some"),
        (["--policies", "static,best"], "unknown"),
        (["--policies", "static,paper:speed=3"], "no parameter 'speed'"),
        (["--hardware", "pc-low,mainframe"], "mainframe"),
        (["--hardware", "guide", "--dtype", "q8_0"], "--dtype has no effect"),
        (["--topic-switch"], "2 steps or more"),
    ],
)
def test_compare_refuses_what_it_cannot_do(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("compare", *TRACES, "--steps", "1", "--hardware", "pc-low", *words)


def test_compare_finds_mistakes_before_it_replays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [*TRACES, "--steps", "1", "--hardware", "pc-low"]
    with pytest.raises(ValueError, match="unknown"):
        run("compare", *words, "--policies", "static,best")
    with pytest.raises(ValueError, match="--hardware guide counts"):
        run("compare", *TRACES, "--hardware", "pc-low,guide", "--forecast", "previous")
    with pytest.raises(OSError, match="file"):
        run("compare", *words, "--policies", "static", "--out", str(tmp_path / "file" / "results"))
    assert capsys.readouterr().err == ""  # no cell was begun


def test_plots_are_drawn_or_say_what_is_missing(tmp_path: Path) -> None:
    words = [*TRACES, "--steps", "3", "--policies", "paper,split", "--hardware", "pc-low"]
    words += ["--out", str(tmp_path), "--plots"]
    try:
        import matplotlib  # noqa: F401  # pyright: ignore
    except ImportError:
        with pytest.raises(ValueError, match="pip install matplotlib"):
            run("compare", *words)
        return
    assert run("compare", *words) == 0
    assert {"time.png", "hit_rate.png", "steps.png", "capacity.png"} <= {p.name for p in tmp_path.iterdir()}


def test_a_damaged_profile_is_told_as_one(tmp_path: Path) -> None:
    whole = Path(TRACES[0]).read_bytes()
    np.save(tmp_path / "array.npy", np.ones(3))
    for content in (b"no zip", whole[:20000], (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(
            ValueError, match=r"cannot read .*bad.npz: it is neither .*; give a file of `kairox"
        ):
            run("replay", TRACES[0], "--prior", str(tmp_path / "bad.npz"), "--steps", "2")
    with pytest.raises(ValueError, match="none.npz: No such file"):
        run("replay", TRACES[0], "--prior", str(tmp_path / "none.npz"), "--steps", "2")


def test_compare_counts_its_replays(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TRACES[0], "--steps", "8", "--policies", "static,lru", "--hardware", "guide"]
    assert run("compare", *words) == 0
    assert "4/4" in capsys.readouterr().err
    assert run("compare", *words, "--quiet") == 0
    assert "4/4" not in capsys.readouterr().err
