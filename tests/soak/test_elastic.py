"""What the soak of elastic jobs takes for right and for wrong, without its jobs."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace

import pytest

from tests.jobs.elastic_ends import STEPS, undisturbed_end
from tests.soak import elastic
from tests.soak.elastic import judge
from tests.soak.plans import Plan, draw, kind_of
from tests.soak.undisturbed import replayed


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    elastic.add_arguments(parser)
    return parser.parse_args(given)


PLAN = Plan("numpy", "ps", 2, 3, 1, 0, 0, "shrink", "device", False, 0.0, ("start:1:2:kill",))
FEWER = "commsched run: the job goes on with 1 rank instead of 2, from step 2\n"


def test_weights_computed_anew_are_those_of_a_job() -> None:
    assert undisturbed_end().split()[0] == replayed([2] * STEPS)


def test_choices_come_from_the_seed() -> None:
    def drawn(seed: int) -> list[Plan]:
        return [draw(random.Random(f"{seed} {number}"), arguments()) for number in range(50)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert {plan.limit for plan in drawn(1)} == {"wait", "shrink", "late"}


def test_the_kinds_of_losses() -> None:
    kinds = [kind_of(each) for each in ("start:1:5:term", "stepped:s0:7:kill", "start:l1:3:lost", "connecting:0:2:stop")]
    assert kinds == [
        "rank, by SIGTERM",
        "server, killed",
        "machine, killed",
        "rank, frozen, while a generation opens (connecting)",
    ]


def end(rank: int, sizes: list[int], digest: str) -> str:
    return f"rank {rank} weights {digest} shares {' '.join(f'{step}/{size}' for step, size in enumerate(sizes))}\n"


def outcome(plan: Plan, out: str, err: str, code: int | None = 0) -> tuple[str, str]:
    result = judge(plan, arguments(), code, out, err)
    return result.outcome, result.why


def test_right_weights() -> None:
    both, one = replayed([2, 2, 2]), replayed([2, 2, 1])
    assert outcome(PLAN, end(0, [2, 2, 2], both) + end(1, [2, 2, 2], both), "") == ("exact", "")
    assert outcome(PLAN, end(0, [2, 2, 1], one), FEWER) == ("exact, with fewer ranks", "")
    in_torch = replace(PLAN, engine="torch")
    assert outcome(in_torch, end(0, [2, 2, 1], "1f"), FEWER) == ("equal ranks and the right batches, with fewer ranks", "")


@pytest.mark.parametrize(
    ("out", "err", "why"),
    [
        (end(0, [2, 2, 2], "1f") + end(1, [2, 2, 2], "2e"), "", "ranks differ"),
        (end(0, [2, 2, 2], "1f") + end(1, [2, 2, 2], "1f"), "", "they are others than without a loss"),
        (end(0, [2, 2, 1], "1f"), FEWER, "they are not those of these batches"),
        (end(0, [2, 1, 1], replayed([2, 1, 1])), FEWER, "the batches of the steps are not [2, 2, 1]"),
    ],
)
def test_wrong_weights(out: str, err: str, why: str) -> None:
    found, said = outcome(PLAN, out, err)
    assert found == "WRONG WEIGHTS"
    assert said.startswith(why)


def test_other_ends() -> None:
    assert outcome(PLAN, "", "", None)[0] == "HANG"
    assert outcome(PLAN, "", "Traceback", 1)[0] == "FAILURE"
    assert outcome(PLAN, end(0, [2, 2, 2], "1f"), "")[0] == "FAILURE"  # rank 1 is missing
    held = "no rank is left that has the values after a step: all that had them are lost"
    assert outcome(PLAN, "", held, 1)[0] == "ended, since all that had the values were lost"
