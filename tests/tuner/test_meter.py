"""Windows of exact times, and what is told of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import ClosedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.testing.world import run_world
from commsched.tuner.meter import StepTimer, summary
from commsched.tuner.stats import DriftDetector


def manifest(elements: int) -> Manifest:
    return Manifest((TensorSpec("t", (elements,), "float32"),))


class Engine:
    """Begins the steps of a group, each so many seconds after the one before."""

    def __init__(self, meter: StepTimer, group: int = 0) -> None:
        self.meter = meter
        self.group = group
        self.step = 0
        self.at = 100.0
        meter.on_step(group, 0, self.at)

    def steps(self, *seconds: float) -> None:
        for each in seconds:
            self.at += each
            self.step += 1
            self.meter.on_step(self.group, self.step, self.at)


def metered() -> tuple[StepTimer, list[Any]]:
    told: list[Any] = []
    meter = StepTimer(told.append)
    meter.add_group(0, manifest(100))
    return meter, told


def window(trial: int = 0, *, group: int = 0, settle: int = 3, steps: int = 4) -> dict[str, int]:
    return {"trial": trial, "group": group, "settle": settle, "steps": steps}


def test_a_window_begins_at_its_step_and_leaves_out_what_settles() -> None:
    meter, told = metered()
    engine = Engine(meter)
    engine.steps(1.0)
    meter.on_switch(window(7), {0: 5})
    engine.steps(9.0, 9.0, 9.0, 9.0)  # step 5 begins: the change
    engine.steps(50.0, 50.0, 50.0)  # settles
    engine.steps(2.0, 2.1, 1.9)
    assert told == []
    engine.steps(2.0)
    [report] = told
    assert report["seconds"] == pytest.approx(2.0)
    assert {key: report[key] for key in ("trial", "steps", "rejected")} == {"trial": 7, "steps": 4, "rejected": 0}
    # Deviations 0, 0.1, 0.1, 0: their median is 0.05.
    assert report["error"] == pytest.approx(1.2533 * 1.4826 * 0.05 / 2)
    engine.steps(*[7.0] * 20)
    assert len(told) == 1


@pytest.mark.parametrize("place", range(11))
def test_an_evaluation_in_the_window_is_left_out_wherever_it_comes(place: int) -> None:
    meter, told = metered()
    engine = Engine(meter)
    meter.on_switch(window(settle=0, steps=10), {0: 1})
    times = [1.0] * 11
    times[place] = 30.0
    engine.steps(1.0, *times)
    if place == 10:  # it was full before
        assert (told[0]["seconds"], told[0]["rejected"]) == (1.0, 0)
    else:
        assert (told[0]["seconds"], told[0]["steps"], told[0]["rejected"]) == (1.0, 10, 1)


@pytest.mark.parametrize("phase", range(5))
def test_steps_that_are_slow_again_and_again_count_as_much_as_they_cost(phase: int) -> None:
    """A GAN's discriminator, whose every fifth interval holds a step of the generator. Of two configurations, one makes the
    usual interval a little shorter, and that one much longer."""

    def measure(usual: float, fifth: float) -> dict[str, Any]:
        found, times = None, list[float]()
        while found is None:
            times.append(fifth if len(times) % 5 == phase else usual)
            found = summary(times, 10)
        return found

    better, worse = measure(1.0, 4.0), measure(0.98, 12.0)
    assert better["seconds"] == pytest.approx(1.6)
    assert worse["seconds"] == pytest.approx((8 * 0.98 + 2 * 12.0) / 10)
    assert better["error"] == pytest.approx(0.4)  # as uneven as they are
    assert (better["steps"], better["rejected"]) == (10, 0)


def test_a_configuration_under_which_steps_stall_is_not_taken_for_a_fast_one() -> None:
    times = [1.0, 0.9, 1.1, 5.0, 1.0, 1.0, 6.0, 1.0, 1.0, 7.0]
    found = summary(times, 10)
    assert found is not None
    assert (found["seconds"], found["rejected"]) == (pytest.approx(2.5), 0)


def test_steps_that_are_long_and_short_in_turn_are_not_disturbed() -> None:
    meter, told = metered()
    engine = Engine(meter)
    meter.on_switch(window(settle=0, steps=10), {0: 1})
    engine.steps(1.0, *[1.0, 5.0] * 10)
    assert (told[0]["seconds"], told[0]["rejected"]) == (3.0, 0)
    assert told[0]["error"] > 1.0


@given(st.lists(st.floats(0.001, 1000.0), min_size=20, max_size=20), st.integers(1, 10))
def test_whatever_the_times_a_window_ends(times: list[float], steps: int) -> None:
    meter, told = metered()
    engine = Engine(meter)
    meter.on_switch(window(settle=0, steps=steps), {0: 1})
    engine.steps(1.0, *times)
    [report] = told
    assert report["steps"] >= steps
    assert report["steps"] + report["rejected"] <= 1.12 * steps
    assert report["rejected"] <= 0.1 * (report["steps"] + report["rejected"])
    assert min(times) * 0.99 <= report["seconds"] <= max(times) * 1.01
    assert report["error"] >= 0


def test_a_newer_window_replaces_one_that_is_not_full() -> None:
    meter, told = metered()
    engine = Engine(meter)
    meter.on_switch(window(1, settle=0), {0: 1})
    engine.steps(1.0, 1.0, 1.0)
    meter.on_switch(window(2, settle=0), {0: 5})
    engine.steps(1.0, 1.0, 2.0, 2.0, 2.0)
    assert told == []
    engine.steps(2.0)
    assert [(report["trial"], report["seconds"]) for report in told] == [(2, 2.0)]


def test_steps_of_other_groups_do_not_count_but_tell_of_one_that_has_ended() -> None:
    meter, told = metered()
    meter.add_group(1, manifest(5))
    engine, other = Engine(meter), Engine(meter, 1)
    engine.steps(1.0)
    meter.on_switch(window(settle=0), {0: 2, 1: 1})
    other.steps(*[0.001] * 100)
    engine.steps(1.0, 1.0, 1.0)
    other.steps(*[0.001] * 100)
    engine.steps(1.0, 1.0)
    assert told[0]["seconds"] == 1.0
    meter.on_switch(window(8, settle=0), {0: 20, 1: 1000})
    other.steps(*[0.001] * 500)
    assert len(told) == 1
    other.steps(0.001)
    assert told[1:] == [{"trial": 8, "failed": "group 0 is not the main one any more"}]


def test_a_larger_group_ends_a_window_at_once() -> None:
    meter, told = metered()
    Engine(meter).steps(1.0, 1.0)
    meter.add_group(1, manifest(1000))
    meter.on_switch(window(8), {0: 20})
    larger = Engine(meter, 1)
    assert told == []  # what has one step only may be sent once
    larger.steps(1.0)
    assert told == [{"trial": 8, "failed": "group 0 is not the main one any more"}]


def test_a_group_without_steps_to_come_is_said_at_once_and_is_the_main_one_no_more() -> None:
    meter, told = metered()
    Engine(meter).steps(1.0, 1.0)
    meter.on_switch(window(4), {1: 7})
    assert told == [{"trial": 4, "failed": "group 0 has no steps any more"}]
    assert meter.main_group() is None
    assert meter.manifests() == [manifest(100)]  # it was there


def test_nobody_to_tell_is_no_error_of_the_engine() -> None:
    tried: list[Any] = []

    def tell(report: Any) -> None:
        tried.append(report)
        raise ClosedError("this session is closed")

    meter = StepTimer(tell)
    meter.add_group(0, manifest(1))
    meter.on_switch(window(settle=0, steps=1), {0: 1})
    Engine(meter).steps(1.0, 1.0, 1.0)
    assert [report["trial"] for report in tried] == [0]


def test_it_tells_without_holding_its_lock() -> None:
    """Rank 0's tuner answers with the next window in the same call, in the worst case."""
    seen: list[int] = []

    def tell(report: Any) -> None:
        seen.append(report["trial"])
        meter.on_switch(window(report["trial"] + 1, settle=0, steps=1), {0: 100})

    meter = StepTimer(tell)
    meter.add_group(0, manifest(1))
    meter.on_switch(window(settle=0, steps=1), {0: 1})
    run_world(1, lambda rank: Engine(meter).steps(1.0, 1.0, 1.0), timeout_seconds=60)
    assert seen == [0]


# --- which group counts, and waiting for it ---


def test_the_main_group_is_the_largest_that_has_had_several_steps() -> None:
    meter, _ = metered()
    meter.add_group(1, manifest(1000))
    meter.add_group(2, manifest(10))
    assert meter.main_group() is None
    engine = Engine(meter)
    engine.steps(1.0)
    assert meter.main_group() == 0
    large = Engine(meter, 1)  # one step only: what is sent once
    assert meter.main_group() == 0
    large.steps(1.0)
    assert meter.main_group() == 1
    engine.steps(*[1.0] * 501)  # the large one has had its last, it seems
    assert meter.main_group() == 0
    assert meter.manifests() == [manifest(100), manifest(1000), manifest(10)]


def in_thread(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Begin ``fn``; what is returned waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(fn()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        return results[0]

    return result


def test_a_released_group_is_not_waited_for() -> None:
    """A smaller group takes over with its second step, and ends a window of the released one."""
    released, told = set[int](), list[Any]()
    meter = StepTimer(told.append, is_over=released.__contains__)
    meter.add_group(0, manifest(100))
    meter.add_group(1, manifest(10))
    Engine(meter, 0).steps(1.0)
    meter.on_switch(window(5), {0: 3})
    released.add(0)
    assert meter.main_group() is None
    smaller = Engine(meter, 1)
    smaller.steps(1.0)
    assert meter.main_group() == 1
    assert told == [{"trial": 5, "failed": "group 0 is not the main one any more"}]


def test_waiting_until_training_is_under_way() -> None:
    meter, _ = metered()
    waiting = in_thread(lambda: meter.wait_until_training(5))
    engine = Engine(meter)
    engine.steps(*[1.0] * 4)
    assert waiting() == (0, manifest(100))
    assert meter.wait_until_training(5) == (0, manifest(100))


def test_waiting_for_a_drift() -> None:
    meter, _ = metered()
    engine = Engine(meter)
    drift = DriftDetector(window_steps=2, windows=2, rest_steps=0)
    waiting = in_thread(lambda: meter.wait_for_change(0, drift))

    def until_told(times: Iterable[float]) -> None:
        for seconds in times:
            engine.steps(seconds)

    while drift.before_seconds == 0.0:  # until it waits, nothing is told
        until_told([1.0])
    until_told([3.0] * 8)
    assert waiting() is True
    assert drift.now_seconds == 3.0


def test_waiting_ends_when_another_group_is_trained() -> None:
    meter, _ = metered()
    Engine(meter).steps(1.0, 1.0)
    meter.add_group(1, manifest(1000))
    waits = [in_thread(lambda: meter.wait_for_change(0, DriftDetector()))]
    larger = Engine(meter, 1)
    larger.steps(1.0)
    assert waits[0]() is True
    assert meter.wait_for_steps(0, 5) is False
    assert meter.main_group() == 1


@pytest.mark.parametrize("began", [False, True])
def test_closing_ends_every_wait(began: bool) -> None:
    meter, _ = metered()
    if began:
        Engine(meter).steps(1.0, 1.0)
    waits = [in_thread(lambda: meter.wait_until_training(50))]
    meter.close()
    assert waits[0]() is None
    assert meter.wait_for_change(0, DriftDetector()) is False
    assert meter.wait_for_steps(0, 5) is False
    assert meter.wait_until_training(1) is None
