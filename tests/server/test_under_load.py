"""The load benchmark on the scripted model: many at once, a third of them leaving, nothing stuck, nothing changed."""

import json
from pathlib import Path

import pytest
from server_process import Server

from benchmarks.bench_server import main
from benchmarks.load_clients import Outcome, differing, make_calls, summary


@pytest.mark.slow
def test_many_at_once_get_what_each_gets_alone(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "report.json"
    status = main(["--url", server.url, "--requests", "16", "--clients", "8", "--out", str(out)])
    report = json.loads(out.read_text())
    assert status == 0, report
    assert report == json.loads(capsys.readouterr().out)
    assert (
        report["at_once"]["requests"] == 16 and report["at_once"]["tokens"] == report["alone"]["tokens"] > 0
    )
    assert 0 < report["at_once_cut"]["cut_off"] < 16 and report["stuck"] == {"active": 0, "waiting": 0}
    assert report["at_once"]["first_token_s_p99"] >= report["at_once"]["first_token_s_median"] > 0


def test_calls_are_drawn_by_the_seed():
    calls = make_calls(300, seed=3, cut_frac=1 / 3)
    assert calls == make_calls(300, seed=3, cut_frac=1 / 3) != make_calls(300, seed=4, cut_frac=1 / 3)
    cut = [call for call in calls if call.leave_after is not None]
    assert 70 < len(cut) < 130 and all(0 <= call.leave_after < call.max_tokens for call in cut)


def test_what_is_counted():
    def outcome(text: str | None, tokens: int, error: str = "") -> Outcome:
        return Outcome(text=text, tokens=tokens, first_token_s=tokens / 10, refused=1, error=error)

    outcomes = [outcome("a", 2), outcome(None, 1), outcome(None, 0, "broken")]
    counts = summary(outcomes, 2.0)
    assert (counts["tokens_per_s"], counts["cut_off"], counts["refused_429"]) == (1.5, 1, 3)
    assert counts["errors"] == ["broken"] and counts["first_token_s_median"] == 0.1
    assert differing(outcomes, [outcome("b", 2)] * 3) == [0]
