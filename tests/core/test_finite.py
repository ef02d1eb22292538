"""Which rank is named when gradients stay NaN or infinite, and that what goes away is not told."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import pytest

from commsched.core.finite import LASTING_STEPS, FiniteReport, FirstNotFinite, NotFinite, looks_finite
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.task import CommTask

FINITE = [0.0, -0.0, 1.0, -2.0, 65504.0, 6e-8]
NOT_FINITE = [math.inf, -math.inf, math.nan]
LARGEST = {"float32": 3.4e38, "float64": 1.7e308}

MANIFEST = Manifest((TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32")))


def elements(dtype: str, values: Sequence[float]) -> memoryview:
    if dtype == "bfloat16":  # the upper half of a float32
        return memoryview(b"".join(struct.pack("<f", value)[2:] for value in values))
    code = {"float16": "e", "float32": "f", "float64": "d"}[dtype]
    return memoryview(struct.pack(f"<{len(values)}{code}", *values))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_ends_of_a_partition_tell_finite_values_from_others(dtype: str) -> None:
    for value in [*FINITE, *([LARGEST[dtype], -LARGEST[dtype]] if dtype in LARGEST else [])]:
        assert looks_finite(dtype, elements(dtype, [value])), value
        assert looks_finite(dtype, elements(dtype, [value, math.nan, -value]))  # what lies between is not looked at
    for value in NOT_FINITE:
        for values in ([value], [value, 1.0], [1.0, value], [value, 1.0, value]):
            assert not looks_finite(dtype, elements(dtype, values)), values


def test_bytes_are_no_numbers() -> None:
    assert looks_finite("uint8", memoryview(b"\xff"))


def task(step: int, values: Sequence[float], described: Manifest = MANIFEST, group: int = 0) -> CommTask:
    return CommTask(group, step, cut(described, 1000).partitions[0], elements("float32", values))


def reports(steps: Sequence[int], values: Sequence[float] = (1.0, 1.0, 1.0, math.nan), group: int = 0) -> list[FiniteReport]:
    mine = NotFinite()
    return [report for step in steps if (report := mine.add(task(step, values, group=group), MANIFEST))]


def test_what_lasts_is_reported_with_its_first_step_and_again_while_it_lasts() -> None:
    assert reports(range(7, 7 + LASTING_STEPS)) == [FiniteReport(0, 7, "b")]
    assert reports(range(7, 7 + 3 * LASTING_STEPS), [math.inf, 1.0, 1.0, 1.0]) == 3 * [FiniteReport(0, 7, "a")]


def test_a_scale_of_the_loss_that_comes_down_is_not_reported() -> None:
    assert reports(range(LASTING_STEPS - 1)) == []
    assert reports([step for step in range(1000) if step % LASTING_STEPS]) == []  # one step in each was finite


def test_several_partitions_of_one_step_count_once() -> None:
    assert reports(sorted([*range(LASTING_STEPS - 1)] * 3)) == []


def test_groups_are_counted_apart() -> None:
    mine = NotFinite()
    found = []
    for step in range(LASTING_STEPS):
        for group in (0, 1):
            if group == 0 or step > 5:
                found.append(mine.add(task(step, [math.nan] * 4, group=group), MANIFEST))
    assert [report for report in found if report] == [FiniteReport(0, 0, "a")]


def test_what_plugins_send_of_their_own_may_be_nan() -> None:
    flags = Manifest((TensorSpec("commsched.kept", (4,), "float32"),))
    mine = NotFinite()
    assert not any(mine.add(task(step, [math.nan] * 4, flags), flags) for step in range(100))


def said(world_size: int, *told: tuple[int, int]) -> list[str | None]:
    """What rank 0 says when ranks report what they have seen since steps."""
    first = FirstNotFinite(world_size)
    return [first.add(rank, FiniteReport(0, since, f"t{rank}")) for rank, since in told]


def test_the_first_rank_is_named_whoever_reports_first_and_once() -> None:
    line = (
        "rank 1 has had gradients that are not finite (NaN or infinite) in every step since step 7, 't1' among them, "
        "ranks 0, 2 since step 8; training goes on, as it would without commsched"
    )
    for told in ([(0, 8), (1, 7), (2, 8)], [(2, 8), (0, 8), (1, 7)], [(1, 7), (0, 8), (2, 8)]):
        assert said(3, *told, (1, 7), (0, 8)) == [None, None, line, None, None]


def test_a_rank_that_has_nothing_to_report_is_not_waited_for() -> None:
    assert said(3, (2, 5), (2, 5)) == [
        None,
        "rank 2 has had gradients that are not finite (NaN or infinite) in every step since step 5, 't2' among them; training "
        "goes on, as it would without commsched",
    ]


def test_all_ranks_at_once() -> None:
    [_, line] = said(2, (1, 0), (0, 0))
    assert str(line).startswith("ranks 0, 1 have had gradients that are not finite")
