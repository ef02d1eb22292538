"""``bench demo``: which of its steps count, and that it starts its own ranks."""

import pytest

from bench import __main__ as bench_main
from bench import demo
from bench.demo_worker import BLOCK_STEPS, counted_steps, is_last_chance


@pytest.mark.parametrize("steps", [*range(60, 100), 180, 333])
@pytest.mark.parametrize("late", [0, 2])
def test_steps_of_both_policies_count_if_sizes_are_never_settled(steps, late):
    """``late``: steps after which a change of policy is agreed on."""
    first = next(step for step in range(0, steps, BLOCK_STEPS) if is_last_chance(step, steps))
    turns = [("fifo", "priority")[(step - first) // BLOCK_STEPS % 2] for step in range(first, steps)]
    policies = ["priority"] * (first + late) + turns[: len(turns) - late]
    counted = counted_steps(policies, first)
    assert min(counted) >= first + BLOCK_STEPS
    for policy in ("fifo", "priority"):
        assert len([step for step in counted if policies[step] == policy]) >= 2
    for step in counted:
        assert set(policies[step - 2 : step + 2]) == {policies[step]}


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
