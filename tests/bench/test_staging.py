"""Real processes with gradients in the host's memory and on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main

SMALL = ["--layers", "3", "--megabytes", "1", "--compute", "0.01", "--rate", "1gbit", "--rounds", "2", "--steps", "1"]


def test_a_row_for_each_speed_of_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "staging.json"
    assert main(["staging", *SMALL, "--copies", "1,25", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["where"] for row in rows] == [
        "the host's memory",
        "a device, copies at 1 GB/s",
        "a device, copies at 25 GB/s",
    ]
    assert rows[0]["ratio"] == 1
    assert all(row["milliseconds"] > 10 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5
