"""``bench demo`` under a launcher."""

import pytest

from bench import __main__ as bench_main
from bench import demo


def test_it_starts_its_own_ranks_and_so_is_not_started_by_a_launcher(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(demo, "launch", lambda *_: pytest.fail("it starts ranks"))
    assert bench_main.main(["demo"]) == 1
    printed = capsys.readouterr()
    assert printed.err == (
        f"{bench_main.PROGRAM} demo: torchrun has started this process as rank 1 of 2, but this benchmark starts its own "
        "ranks: run it without a launcher (train --real runs with one)\n"
    )
    assert printed.out == ""
