"""Real processes that train in each way: one that does not train as the others do ends the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main

SMALL = ["elastic", "--layers", "2", "--width", "8", "--batches", "2,3", "--rounds", "2", "--steps", "1"]


def test_a_row_for_each_batch_and_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "elastic.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    ways = ["no Elastic", "Elastic, without --elastic", "--elastic", '--elastic, keep="nothing"']
    assert [(row["batch"], row["way"]) for row in rows] == [(batch, way) for batch in (2, 3) for way in ways]
    assert all(row["milliseconds"] > 0 for row in rows)
    assert [row["ratio"] for row in rows if row["way"] == "no Elastic"] == [1, 1]
    assert len(capsys.readouterr().out.splitlines()) == 10
