"""What a session says of its steps, and what ``Session.stats`` has for loggers."""

from __future__ import annotations

import json
import logging
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from commsched.core.group import TensorGroup
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.scheduler import SchedulerConfig
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.session.stats import scalars
from commsched.session.tuning import facts_of, start_assessing
from commsched.settings import Settings
from commsched.tuner.learn import NothingMeasured
from tests.tuner.training import UNTIL_ENDED, WIDE, Training, choosing

#: Few partitions of the default network, so that a step takes some milliseconds.
FEW = SchedulerConfig(2000, 4000)

#: What the first line says besides where the machine gave one rank's thread less time than the other's.
LATE = r"(, [\d.]+ ms of which are for rank 1, which computes longer)?"

RANK_0_KNOWS = {
    "slowest_rank",
    "late_seconds",
    "network_bytes_per_second",
    "bound_seconds",
    "bound_16_bits_seconds",
    "bound_with_servers_seconds",
    "full_wait",
}


class Assessed:
    """A training that ends soon after it was assessed; ``lines`` are those of rank 0, ``stats`` the last ones of each rank."""

    def __init__(self, settings: Settings | None = None, **training: Any) -> None:
        self.lines: list[str] = []
        self.stats: dict[int, dict[str, Any]] = {}
        self._settings = settings or Settings()
        self._ended = threading.Event()
        given = {"steps": UNTIL_ENDED, "config": FEW, "delay_seconds": 0.002, "until": self._ended, **training}
        self.training = Training(open_rank=self._open_rank, before_step=self._before_step, **given)
        self.by_rank = self.training.run()

    def _open_rank(self, session: Session) -> None:
        if session.rank == 0:
            start_assessing(session, self._settings, facts_of(session, self._settings, "local", "127.0.0.1", 1), self._say)

    def _before_step(self, session: Session, step: int) -> None:
        self.stats[session.rank] = session.stats()

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self._ended.set()


@pytest.fixture(scope="module")
def assessed() -> Assessed:
    return Assessed()


def test_two_lines_are_said_once(assessed: Assessed) -> None:
    first, *rest = assessed.lines
    assert len(rest) <= 1
    number = r"[\d.]+"
    assert re.fullmatch(
        rf"after (\d+) steps, a step takes {number} ms: {number} ms of computation and {number} ms of exposed communication "
        rf"\({number} %\){LATE}; with this model and network "
        rf"\((at least )?{number} [MG]B/s of gradients( within one machine)?\) the bound is {number} ms",
        first,
    )
    assert int(first.split()[1]) >= 20


def test_statistics_are_json_with_the_same_keys_on_every_rank(assessed: Assessed) -> None:
    ours, theirs = assessed.stats[0], assessed.stats[1]
    assert ours.keys() == theirs.keys() == json.loads(json.dumps(ours)).keys()
    assert (ours["rank"], theirs["rank"], ours["world_size"]) == (0, 1, 2)
    assert ours["step_seconds"] == pytest.approx(ours["compute_seconds"] + ours["exposed_seconds"], rel=1.0)
    assert ours["gradient_bytes"] == theirs["gradient_bytes"] > 0
    assert ours["exposed_seconds"] > 0.001  # every send and every reply takes 2 ms
    assert ours["bound_seconds"] > 0
    assert ours["network_bytes_per_second"] > 0
    assert [theirs[key] for key in sorted(RANK_0_KNOWS)] == [None] * len(RANK_0_KNOWS)
    assert theirs["layers"] == []
    assert sum(layer["bytes"] for layer in ours["layers"]) == ours["gradient_bytes"]
    assert sum(layer["waited_seconds"] for layer in ours["layers"]) > 0


def test_scalars_are_the_known_numbers_that_a_logger_draws(assessed: Assessed) -> None:
    found = scalars(assessed.stats[0], "commsched/")
    assert found["commsched/step_seconds"] == assessed.stats[0]["step_seconds"]
    assert "commsched/bound_seconds" in found
    assert "commsched/bound_seconds" not in scalars(assessed.stats[1], "commsched/")
    assert {type(value) for value in found.values()} <= {int, float}
    assert not {"commsched/layers", "commsched/rank", "commsched/gradient_bytes"} & found.keys()


def test_gradients_of_a_model_that_is_trained_no_more_do_not_count() -> None:
    sessions = local_sessions(2)
    [session, other] = sessions

    def register(width: int) -> list[TensorGroup]:
        manifest = Manifest((TensorSpec("weight", (width,), "float32"),))
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda each: each.register(manifest, {"float32": memoryview(bytearray(4 * width))}), sessions))

    try:
        large, _ = register(100), register(10)
        assert session.stats()["gradient_bytes"] == 400
        for group in large:
            group.release()
        assert session.stats()["gradient_bytes"] == other.stats()["gradient_bytes"] == 40
    finally:
        for each in sessions:
            each.abort("the test is over")


def test_bytes_and_times_are_of_one_model() -> None:
    """A large one may be registered long before it is trained."""
    sessions = local_sessions(2)

    def train(session: Session) -> dict[str, Any]:
        groups = {}
        for width in (100, 10):
            manifest = Manifest((TensorSpec("weight", (width,), "float32"),))
            groups[width] = session.register(manifest, {"float32": memoryview(bytearray(4 * width))})
        for _ in range(3):
            groups[10].begin_step()
            groups[10].notify_ready(0)
            groups[10].proxies[0].wait()
        return session.stats()

    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(train, sessions))
        assert [(stats["steps"] > 0, stats["gradient_bytes"]) for stats in found] == [(True, 40)] * 2
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_before_any_step_nothing_is_known() -> None:
    sessions = local_sessions(2)
    try:
        stats = sessions[0].stats()
        assert (stats["steps"], stats["gradient_bytes"], stats["layers"]) == (0, 0, [])
        assert stats["step_seconds"] is stats["compute_seconds"] is stats["bound_seconds"] is None
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_statistics_may_be_asked_for_while_tensors_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, here just before the core knows the tensors."""
    seen: list[dict[str, Any]] = []
    add_group = Session._add_group

    def ask_first(session: Session, *args: Any) -> Any:
        seen.append(session.stats())
        return add_group(session, *args)

    monkeypatch.setattr(Session, "_add_group", ask_first)
    Training(steps=2).run()
    assert {stats["steps"] for stats in seen} == {0}


def test_an_error_in_the_last_line_does_not_end_a_job_that_has_succeeded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("commsched.tuner.assessment.last_lines", broken)
    Assessed()
    assert "the last steps were not assessed: ValueError: a mistake of ours" in caplog.messages


def test_the_end_has_one_more_line_if_there_were_two(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="commsched"):
        Assessed()
        ends = [message for message in caplog.messages if "steps, at the end" in message]
        assert len(ends) == 1
        assert re.match(
            r"\d+ steps, at the end [\d.]+ ms each: .* of exposed communication \([\d.]+ %\); the bound was", ends[0]
        )
        caplog.clear()
        Training(steps=25).run()
    assert not any("steps, at the end" in message for message in caplog.messages)


def test_an_engine_whose_waits_are_not_seen_says_less() -> None:
    class Hidden(Assessed):
        def _before_step(self, session: Session, step: int) -> None:
            session.statistics.waits_elsewhere = True
            super()._before_step(session, step)

    found = Hidden()
    assert "this engine does not show what it waits for" in found.lines[0]
    assert found.stats[0]["compute_seconds"] is found.stats[0]["bound_seconds"] is None
    assert found.stats[0]["step_seconds"] > 0


def test_steps_that_cannot_be_profiled_are_still_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(*_: object) -> None:
        raise NothingMeasured("nothing was sent")

    monkeypatch.setattr("commsched.tuner.learn.Learner.profile", profile)
    found = Assessed()
    assert re.fullmatch(rf"after \d+ steps, a step takes .* of exposed communication \([\d.]+ %\){LATE}", found.lines[0])


def test_an_error_of_the_assessment_does_not_end_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("commsched.tuner.assessment.assess", broken)
    warned = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the steps were not assessed" in record.getMessage():
                warned.set()

    handler = Watch()
    logging.getLogger("commsched").addHandler(handler)
    try:
        found = Assessed(until=warned)
    finally:
        logging.getLogger("commsched").removeHandler(handler)
    assert found.lines == []
    assert any(message == "the steps were not assessed: ValueError: a mistake of ours" for message in caplog.messages)


def test_sizes_are_chosen_first() -> None:
    lines: list[str] = []
    ended = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("after"):
            ended.set()

    Training(steps=UNTIL_ENDED, width=WIDE, delay_seconds=0.002, until=ended, open_rank=choosing(Settings(), say)).run()
    kinds = ["chosen" if " chosen: steps of" in line else "assessed" for line in lines]
    assert kinds[:2] == ["chosen", "assessed"]
