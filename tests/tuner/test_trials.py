"""Rank 0's side of a trial, with reports that the test makes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from commsched.core.errors import ClosedError, CommschedError, UnsupportedError
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.trials import MainGroupChanged, Stopped, TrialFailed, TrialRunner, Window

CONFIG = SchedulerConfig(1000, 2000)


def report(trial: int, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"trial": trial, "seconds": seconds, "error": 0.1, "steps": 10, "rejected": 1, **more}


class FakeSession:
    """Calls ``then`` with each window that is proposed, as the ranks' answer."""

    world_size = 3

    def __init__(self, then: Callable[[dict[str, int]], None] = lambda window: None) -> None:
        self.then = then
        self.proposed: list[tuple[SchedulerConfig, Any]] = []
        self.error: CommschedError | None = None

    def reconfigure(self, config: SchedulerConfig, window: Any = None) -> None:
        if self.error is not None:
            raise self.error
        self.proposed.append((config, window))
        if window is not None:
            self.then(window)


def answered(*reports: dict[str, Any]) -> tuple[TrialRunner, FakeSession]:
    """Each trial is answered by these, rank by rank; their trial number is that of the window, unless it is another."""

    def answer(window: dict[str, int]) -> None:
        for rank, given in enumerate(reports):
            trials.on_message(rank, {**given, "trial": window["trial"] + given.get("trial", 0)})

    session = FakeSession(answer)
    trials = TrialRunner(session, lambda: 4, settle_steps=3)
    return trials, session


def test_the_slowest_rank_counts_with_its_own_error() -> None:
    trials, session = answered(report(0, 1.0), report(0, 1.5, error=0.7, rejected=2), report(0, 1.2))
    assert trials.measure(CONFIG, group=4) == Window(1.5, 0.7, 10, 2)
    assert trials.measure(CONFIG, 25, group=4) == Window(1.5, 0.7, 10, 2)
    assert session.proposed == [
        (CONFIG, {"trial": 0, "group": 4, "settle": 3, "steps": 10}),
        (CONFIG, {"trial": 1, "group": 4, "settle": 3, "steps": 25}),
    ]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"failed": "group 4 is not the main one any more"}, "rank 2: group 4 is not the main one any more"),
        (report(0, math.nan), "rank 2 measured nan seconds per step"),
        (report(0, math.inf), "rank 2 measured inf seconds per step"),
        (report(0, 0.0), "rank 2 measured 0.0 seconds per step"),
        (report(0, -1.0), "rank 2 measured -1.0 seconds per step"),
        (report(0, error=math.nan), "rank 2 measured an error of nan seconds"),
        ({"seconds": 1.0}, "rank 2 reported .* which is no window: KeyError"),
        (report(0, seconds="soon"), "rank 2 reported .* which is no window: ValueError"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_measurement_fails_the_trial_and_not_the_next(last: dict[str, Any], message: str) -> None:
    trials, session = answered(report(0), report(0), last)
    with pytest.raises(TrialFailed, match=message):
        trials.measure(CONFIG, group=4)
    session.then = lambda window: [trials.on_message(rank, report(window["trial"])) for rank in range(3)] and None
    assert trials.measure(CONFIG, group=4).seconds == 1.0


def test_a_rank_that_fails_is_not_waited_with() -> None:
    trials, _ = answered({"failed": "group 4 has no steps any more"})
    with pytest.raises(TrialFailed, match="rank 0: group 4 has no steps any more"):
        trials.measure(CONFIG, group=4)


def test_reports_of_an_earlier_trial_count_no_more() -> None:
    trials, session = answered(report(0), {"failed": "disturbed"})
    with pytest.raises(TrialFailed):
        trials.measure(CONFIG, group=4)

    def late(window: dict[str, int]) -> None:
        trials.on_message(2, report(window["trial"] - 1, 50.0))
        trials.on_message(1, {"trial": 0, "failed": "disturbed"})
        trials.on_message(1, "nonsense")
        for rank in range(3):
            trials.on_message(rank, report(window["trial"], 2.0))
            trials.on_message(rank, report(window["trial"] - 1, 50.0))

    session.then = late
    assert trials.measure(CONFIG, group=4).seconds == 2.0


def test_what_an_earlier_trial_measured_is_no_answer_to_the_next() -> None:
    trials, session = answered(report(0), report(0), report(0))
    assert trials.measure(CONFIG, group=4).seconds == 1.0
    session.then = lambda window: trials.stop("training ends")
    with pytest.raises(Stopped, match="training ends"):
        trials.measure(CONFIG, group=4)


def test_what_the_transport_cannot_do_fails_the_trial() -> None:
    trials, session = answered(report(0))
    session.error = UnsupportedError("collective='rsag' averages by ...")
    with pytest.raises(TrialFailed, match="collective='rsag'"):
        trials.measure(CONFIG, group=4)


def test_a_closed_session_or_a_failed_job_stops() -> None:
    trials, session = answered(report(0))
    session.error = ClosedError("this session is closed")
    for call in (partial(trials.measure, group=4), trials.apply):
        with pytest.raises(Stopped, match="this session is closed"):
            call(CONFIG)


@pytest.mark.parametrize("main", [None, 5])
def test_a_group_that_is_not_the_main_one_is_not_measured(main: int | None) -> None:
    session = FakeSession()
    with pytest.raises(MainGroupChanged, match=f"group 4 of tensors is not trained any more, .* that is {main}"):
        TrialRunner(session, lambda: main, 3).measure(CONFIG, group=4)
    assert session.proposed == []


def test_a_group_that_is_trained_no_more_in_the_middle_of_a_trial_is_no_failed_trial() -> None:
    main = 4

    def answer(window: dict[str, int]) -> None:
        nonlocal main
        main = 5
        trials.on_message(1, {"trial": window["trial"], "failed": "group 4 is not the main one any more"})

    trials = TrialRunner(FakeSession(answer), lambda: main, 3)
    with pytest.raises(MainGroupChanged):
        trials.measure(CONFIG, group=4)


def test_stopping_ends_a_wait_and_all_that_comes_later() -> None:
    waits = threading.Event()
    session = FakeSession(lambda window: waits.set())
    trials = TrialRunner(session, lambda: 0, 3)
    why: list[str] = []

    def measure() -> None:
        try:
            trials.measure(CONFIG, group=0)
        except Stopped as error:
            why.append(str(error))

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    assert waits.wait(60)
    trials.stop("rank 1 has left")
    trials.stop("the session closes")
    thread.join(60)
    assert why == ["rank 1 has left"]
    for call in (partial(trials.measure, group=0), trials.apply):
        with pytest.raises(Stopped, match="rank 1 has left"):
            call(CONFIG)
    assert len(session.proposed) == 1


def test_applying_asks_for_no_window() -> None:
    trials, session = answered(report(0))
    trials.apply(CONFIG)
    assert session.proposed == [(CONFIG, None)]
    assert trials.applied == CONFIG
