"""Real processes, DDP beside commsched: whoever does not train as the others do ends the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import small
from bench.__main__ import main

SMALL = ["small", "--parameters", "3", "--rounds", "2", "--steps", "1"]


def test_a_row_for_each_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    rows = {row["system"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["ddp", "commsched, ps", "commsched, gloo"]
    assert all(row["milliseconds"] > 0 and row["cpu_milliseconds"] > 0 for row in rows.values())
    assert rows["ddp"]["ratio"] == rows["ddp"]["cpu_ratio"] == 1
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_step_is_as_long_as_the_slowest_ranks() -> None:
    ddp = [{"seconds": [1.0, 4.0, 2.0], "cpu_seconds": [1.0] * 3}, {"seconds": [2.0, 1.0, 2.0], "cpu_seconds": [3.0] * 3}]
    ours = [{"seconds": [1.0, 8.0, 1.0], "cpu_seconds": [4.0] * 3}, {"seconds": [3.0, 1.0, 2.0], "cpu_seconds": [4.0] * 3}]
    row = small._row("ours", ours, ddp)
    assert row["milliseconds"] == 3000.0
    assert (row["ratio_low"], row["ratio"], row["ratio_high"]) == (1.0, 1.5, 2.0)
    assert row["cpu_ratio"] == 2.0
