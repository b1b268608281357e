"""Tables: form, renewal of a document, and that the documentation shows the saved measurements."""

import json

import pytest

from benchmarks.tables import DOCUMENT, RESULTS, TABLES, disturbance, main, markdown_table, renew, with_spread


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_table_is_padded_and_keeps_its_cells():
    table = markdown_table(["", "a", "long"], [["x", "1.25", "2"], ["wide name", "", "33"]])
    assert len({len(line) for line in table.splitlines()}) == 1
    assert cells(table)[0] == ["", "a", "long"] and cells(table)[2:] == [
        ["x", "1.25", "2"],
        ["wide name", "", "33"],
    ]
    assert set(cells(table)[1][0]) == {"-"} and cells(table)[1][1].endswith("-:")


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        markdown_table(["a", "b"], [["x"]])


def test_a_disturbed_run_says_so():
    assert disturbance([0.0, 0.02, None]) == "" and disturbance([None]) == ""
    assert "Do not quote" in disturbance([0.0, 0.4]) and "0 %, 40 %" in disturbance([0.0, 0.4])


def test_with_spread():
    assert with_spread({"median": 2.25, "min": 1, "max": 3}, 2) == "2.25 (1.00-3.00)"


def test_renew_replaces_only_marked_blocks(monkeypatch):
    monkeypatch.setitem(TABLES, "fake", lambda record: f"value {record['value']}")
    text = "before\n<!-- table: fake a.json -->\nold\nlines\n<!-- end table -->\nafter 1\n"
    text += "<!-- table: fake b.json -->\n<!-- end table -->\n"
    new = renew(text, lambda file: {"value": {"a.json": 5, "b.json": 6}[file]})
    assert new == (
        "before\n<!-- table: fake a.json -->\nvalue 5\n<!-- end table -->\nafter 1\n"
        "<!-- table: fake b.json -->\nvalue 6\n<!-- end table -->\n"
    )
    assert renew(new, lambda file: {"value": {"a.json": 5, "b.json": 6}[file]}) == new


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: nothing a.json -->\n<!-- end table -->\n", "'nothing' is unknown"),
        ("<!-- table: cpu_speed a.json -->\nno end\n", "malformed"),
        ("<!-- table: cpu_speed -->\n<!-- end table -->\n", "malformed"),
    ],
)
def test_broken_blocks_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        renew(text, lambda file: {})


def test_the_documentation_shows_the_saved_measurements(capsys):
    assert "<!-- table: cpu_speed cpu_decode.json -->" in DOCUMENT.read_text()
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_the_saved_measurement_adds_up():
    record = json.loads((RESULTS / "cpu_decode.json").read_text())
    clocked = 0
    for rival in record["rivals"]:
        touched = dict(rival["touched_bytes"])
        assert touched.pop("total") == sum(touched.values()) > 0
        assert len(rival["decode_tokens_per_s"]["samples"]) == record["settings"]["repeats"]
        if "time" in rival:
            clocked += 1
            assert sum(rival["time"]["parts_ms"].values()) == pytest.approx(rival["time"]["total_ms"])
    assert clocked == 4
