"""Which ranks are named as slow, and which are not."""

from __future__ import annotations

import random
from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from commsched.core.pace import EARLY_REPORTS, PARTS_KEPT, REPORT_STEPS, Pace, PaceReport, Stragglers, _median_without


def train(own_seconds: list[float], windows: int, noise: float = 0.0) -> list[str]:
    """What is said of synchronous ranks that take so long for a step, each step as long as the slowest rank."""
    rng = random.Random(0)
    paces, stragglers, now, said = [Pace() for _ in own_seconds], Stragglers(len(own_seconds)), 100.0, []
    for step in range(REPORT_STEPS * windows + 1):
        own = [seconds * (1 + noise * rng.random()) for seconds in own_seconds]
        for rank, pace in enumerate(paces):
            report = pace.step_begins(0, step, now)
            if report is not None:
                said += stragglers.add(rank, report)
            pace.wait_begins(now + own[rank])
            pace.wait_ends(now + max(own))
        now += max(own)
    return said


def test_a_slow_rank_is_named_once_though_all_ranks_have_equal_step_times() -> None:
    assert train([0.1, 0.3, 0.11], 5) == [
        "rank 1 is slow: it takes 300 ms of a step by itself, without waiting, and the other ranks 105 ms "
        "(medians of 50 steps before step 100); they wait for it"
    ]


def test_a_slow_rank_0_of_two_is_named() -> None:
    [line] = train([0.02, 0.01], 3)
    assert line.startswith("rank 0 is slow: it takes 20 ms of a step by itself, without waiting, and the other ranks 10 ms")


def test_noise_small_differences_and_single_reports_name_nobody() -> None:
    assert train([0.1, 0.1, 0.1], 20, noise=0.9) == []
    assert train([0.1, 0.14], 5) == []
    assert train([0.001, 0.004], 5) == []  # four times as long, but nobody would notice
    assert train([0.1, 0.3], 1) == []


def test_slow_reports_must_follow_each_other() -> None:
    stragglers, said = Stragglers(2), []
    for window, own in enumerate([0.3, 0.1, 0.3, 0.1, 0.3]):
        for rank, seconds in enumerate([0.1, own]):
            said += stragglers.add(rank, PaceReport(0, window, seconds, 0.3))
    assert said == []


def test_waits_of_several_threads_count_once_and_a_step_may_begin_within_one() -> None:
    pace = Pace()
    pace.step_begins(0, 0, 0.0)
    pace.wait_begins(1.0)
    pace.wait_begins(2.0)
    pace.wait_ends(3.0)
    for step in range(1, REPORT_STEPS):  # all within the wait that goes on
        assert (pace.step_begins(0, step, 4.0) is None) is (step not in EARLY_REPORTS)
    pace.wait_ends(5.0)
    report = pace.step_begins(0, REPORT_STEPS, 10.0)
    # The medians: the first step had 1 s of its own, the last one 5.
    assert report == PaceReport(0, REPORT_STEPS, 0.0, 0.0, (0.0, 0.0))
    assert pace.end(0, 1) is None
    assert pace.step_begins(0, 0, 11.0) is None
    assert pace.latest(0, 0) == PaceReport(0, 0, 0.0, 0.0)  # what it was stays known


def test_a_wait_lasts_from_the_first_thread_that_waits_to_the_last() -> None:
    pace = Pace()
    for step in range(REPORT_STEPS + 1):
        now = 10.0 * step
        report = pace.step_begins(0, step, now)
        pace.wait_begins(now + 1)
        pace.wait_begins(now + 2)
        pace.wait_ends(now + 3)
        pace.wait_ends(now + 5)
    assert report == PaceReport(0, REPORT_STEPS, 6.0, 10.0, (6.0, 6.0))


def test_the_latest_steps_are_known_at_any_time() -> None:
    pace = Pace()
    assert pace.latest(0, 0) is None
    now = 0.0
    for step in range(2 * REPORT_STEPS):
        assert (pace.latest(0, step) is None) is (step < 2)
        pace.step_begins(0, step, now)
        pace.wait_begins(now + step)
        now += step + 1.0
        pace.wait_ends(now)
    # The last five steps that have ended are those with the numbers 94 to 98: the median one has 96 s of its own, of 97 s.
    assert pace.latest(0, step, 5) == PaceReport(0, step, 96.0, 97.0)
    assert pace.latest(0, step) == PaceReport(0, step, 73.5, 74.5)  # of the last 50


def test_an_early_report_names_nobody_but_its_parts_are_kept() -> None:
    stragglers = Stragglers(2)
    assert stragglers.own_parts(0) == {}
    for step, parts in ((20, (0.3, 0.4, 0.5)), (REPORT_STEPS, (0.6,))):
        assert stragglers.add(1, PaceReport(0, step, 0.3, 0.3, parts)) == []
        assert stragglers.add(0, PaceReport(0, step, 0.1, 0.3, [0.1] * len(parts))) == []
    assert stragglers.own_parts(0) == {0: (0.1,) * 4, 1: (0.3, 0.4, 0.5, 0.6)}
    for rank in range(2):
        stragglers.add(rank, PaceReport(0, 100, 0.1, 0.1, [0.2] * 10))
    assert stragglers.own_parts(0)[1] == (0.2,) * PARTS_KEPT


def test_parts_are_medians_of_five_steps_each_without_the_first_five() -> None:
    pace, parts = Pace(), []
    for step in range(2 * REPORT_STEPS + 1):
        report = pace.step_begins(0, step, float(step * (step - 1) // 2))  # a step takes as many seconds as its number
        parts += [report.parts] if report is not None else []
    assert parts[:3] == [(7.0, 12.0, 17.0), (22.0, 27.0), (32.0, 37.0)]
    assert [len(each) for each in parts] == [3, 2, 2, 2, 10]
    assert parts[-1][-1] == 97.0


def test_of_the_groups_that_have_ended_only_the_largest_stays_known() -> None:
    """A long job may make many groups, for one optimizer after another."""
    pace, forgotten = Pace(), []
    for group, nbytes in enumerate([20, 10, 30, 30, 10]):
        for step in range(3):
            assert pace.step_begins(group, step, float(step)) is None
        assert pace.knows(group)
        forgotten += [pace.end(group, nbytes), pace.end(group, nbytes)]  # it may be released twice
    assert forgotten == [None, None, 1, None, 0, None, 2, None, 4, None]
    assert [group for group in range(5) if pace.latest(group, 2) is not None] == [3]
    pace.step_begins(5, 0, 0.0)
    assert pace.end(5, 100) is None  # it had no step
    assert pace.knows(3)


def test_what_was_reported_of_a_group_is_forgotten_with_it() -> None:
    stragglers = Stragglers(2)
    for group in range(2):
        for rank, own in enumerate([0.1, 0.3]):
            stragglers.add(rank, PaceReport(group, REPORT_STEPS, own, 0.3, (own,)))
        stragglers.add(0, PaceReport(group, 2 * REPORT_STEPS, 0.1, 0.3))
    stragglers.forget(0)
    assert stragglers.own_parts(0) == {}
    assert stragglers.own_parts(1) == {0: (0.1,), 1: (0.3,)}
    kept = stragglers._reports, stragglers._slow, stragglers._parts
    assert [{key if isinstance(key, int) else key[0] for key in each} for each in kept] == [{1}] * 3


def test_what_is_a_small_part_of_a_long_step_names_nobody() -> None:
    stragglers, said = Stragglers(2), []
    for window in range(5):
        for rank, own in enumerate([0.01, 0.03]):
            said += stragglers.add(rank, PaceReport(0, window, own, 1.0))
    assert said == []


def test_groups_are_judged_apart_whichever_is_reported_first() -> None:
    stragglers, said = Stragglers(2), []
    for window in range(2):
        said += stragglers.add(0, PaceReport(1, window, 0.1, 0.3))
        for rank in range(2):
            said += stragglers.add(rank, PaceReport(0, window, 0.1, 0.1))
        said += stragglers.add(1, PaceReport(1, window, 0.3, 0.3))
    assert [line.partition(":")[0] for line in said] == ["rank 1 is slow"]


def test_reports_that_not_all_ranks_give_are_not_kept() -> None:
    stragglers = Stragglers(2)
    for step in range(5):
        stragglers.add(0, PaceReport(0, step, 0.1, 0.1))
    stragglers.add(1, PaceReport(0, 4, 0.1, 0.1))
    assert stragglers._reports == {}


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_the_median_of_the_others_is_found_in_the_order_of_all(times: list[int]) -> None:
    for rank, mine in enumerate(times):
        assert _median_without(sorted(times), mine) == median(times[:rank] + times[rank + 1 :])
