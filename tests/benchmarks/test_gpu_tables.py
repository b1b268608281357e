"""Tables of the GPU page: not measured yet without a record, the newest of several, with the device's name."""

import json

from benchmarks import tables


def test_without_a_record_nothing_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = "<!-- table: gpu_link gpu/*.json -->\nold\n<!-- end table -->\n"
    assert tables.NOT_MEASURED in tables.renew(text, tables.load_record)


def test_the_newest_record_counts_and_names_its_device(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "gpu").mkdir()
    for day, speed in (("2026-01-02", 20.0), ("2026-01-01", 10.0)):
        rows = [{"bytes": 65536, "memory": "pinned_host", "us": 1.0, "gb_per_s": speed}]
        record = {"date": day, "device": {"name": "Card"}, "cpu": "x", "parts": {"link": {"rows": rows}}}
        (tmp_path / f"gpu/{day}.json").write_text(json.dumps(record))
    table = tables.gpu_table("link")(tables.load_record("gpu/*.json"))
    assert table.startswith("Card, 2026-01-02:") and "| 64 " in table and "20.0" in table
    assert tables.gpu_table("decode")(tables.load_record("gpu/*.json")) == tables.NOT_MEASURED
