"""Real processes that train in each way: one that does not train as the others do ends the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import elastic
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


def test_a_step_is_as_long_as_the_slowest_ranks() -> None:
    by_rank = [
        {"no Elastic": [1.0, 4.0, 2.0], "other": [1.0, 8.0, 1.0]},
        {"no Elastic": [2.0, 1.0, 2.0], "other": [3.0, 1.0, 2.0]},
    ]
    row = elastic._row("other", by_rank)
    assert row["milliseconds"] == 3000.0
    assert (row["ratio_low"], row["ratio"], row["ratio_high"]) == (1.0, 1.5, 2.0)
