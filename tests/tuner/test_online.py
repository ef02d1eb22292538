"""Tuning while training runs: the weights are those of training without it, and it ends as it would have ended."""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import commsched
from commsched.core.interfaces import Observer, Transport
from commsched.core.manifest import Manifest
from commsched.core.scheduler import LAUNCH_ORDERS, SchedulerConfig
from commsched.core.task import CommTask
from commsched.core.world import World
from commsched.session.opening import open_session
from commsched.session.session import Session
from commsched.session.tuning import facts_of
from commsched.settings import Budget, Settings
from commsched.tuner import job as search_module
from commsched.tuner.job import TuningJob
from commsched.tuner.learn import JobFacts, Learner, TuningContext
from commsched.tuner.meter import StepTimer
from commsched.tuner.online import OnlineTuner
from commsched.tuner.result import Reason, Verdict
from commsched.tuner.search_run import SearchRun
from commsched.tuner.searchers import Candidate, make_searcher
from commsched.tuner.space import Space, fixed_by
from commsched.tuner.stats import DriftDetector
from commsched.tuner.trials import Stopped, TrialRunner, Window
from tests.jobs.job import run_job, worker
from tests.session.test_session import Ordered

from .test_meter import Engine, manifest
from .training import SMALL, UNTIL_ENDED, WIDE, Training, Weights, require_same_weights, tuned

TRIALS = Settings(tune=Budget(trials=4), tune_by="random")


def tuner_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "commsched-tuner"]


@pytest.fixture(autouse=True)
def no_tuner_is_left() -> Any:
    """A session that is aborted does not wait for its tuner."""
    yield
    for thread in threading.enumerate():
        if thread.name == "commsched-tuner":
            thread.join(60)
    assert tuner_threads() == []


# --- changes of configuration ---


class Borders(Observer):
    """An observer: the partitions of each step of a rank, as they were averaged."""

    def __init__(self) -> None:
        self.of_step: dict[int, dict[str, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
        self._lock = threading.Lock()

    def on_task(self, task: CommTask) -> None:
        with self._lock:
            self.of_step[task.step][task.verb].add((task.partition.start, task.partition.stop))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("order", [None, "agreed", "static", "either"])
def test_training_through_many_changes_is_training_without_any(world_size: int, order: str | None) -> None:
    """Delays at every send and reply, during which gradients are NaN, show a gate that is missing."""
    steps, spread = 90, random.Random(1)
    first_order = "static" if order == "static" else "agreed"
    seen: dict[int, Borders] = {}
    was_static: list[bool] = []  # before each step of rank 0

    def watch(session: Session) -> None:
        seen[session.rank] = Borders()
        session.observe(seen[session.rank])

    def change(session: Session, step: int) -> None:
        if session.rank == 0:
            was_static.append(session.core.is_static)
        # A static order comes about only between changes.
        if session.rank == 0 and step % (2 if order in (None, "agreed") else 15) == 0:
            partition_bytes = spread.choice([100, 300, 400, 1000, 5000, 10**6])
            credit_bytes = round(partition_bytes * spread.choice([0.5, 1, 2, 8]))
            policy = spread.choice(["priority", "fifo"])
            order_then = spread.choice(LAUNCH_ORDERS) if order == "either" else first_order
            session.reconfigure(SchedulerConfig(partition_bytes, credit_bytes, policy, order=order_then))

    wrap: Callable[[Transport], Transport] | None = Ordered if order is not None else None
    config = replace(SMALL, order=first_order)
    common: dict[str, Any] = {"world_size": world_size, "steps": steps, "wrap_transport": wrap, "config": config}
    plain = Training(**common).run()
    # Ordered checks the order of starts, so that it must be inside of what delays them.
    changed = Training(**common, before_step=change, open_rank=watch, delay_seconds=0.0003).run()
    require_same_weights(plain, plain[0])
    require_same_weights(changed, plain[0])
    first = seen[0].of_step
    changes = sum(first[step] != first[step + 1] for step in range(1, steps - 1))
    assert changes >= (20 if order in (None, "agreed") else 3)
    assert any(was_static) == (order in ("static", "either"))
    for rank in range(1, world_size):
        assert seen[rank].of_step == first


# --- tuning ---


@pytest.mark.parametrize("by", ["random", "bayes"])
def test_weights_are_those_of_training_that_is_not_tuned(by: str) -> None:
    lines: list[str] = []
    ended = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if sum("trial" in line for line in lines) == 4:
            ended.set()

    if by == "bayes":
        import_module("skopt.learning.gaussian_process.kernels")  # which takes longer than the trials, on a busy machine
    settings = replace(TRIALS, tune_by=by, tune_policies=("fifo", "priority"))
    training = Training(steps=UNTIL_ENDED, width=WIDE, config=SchedulerConfig(), open_rank=tuned(settings, say), until=ended)
    by_rank = training.run()
    plain = Training(steps=training.taken, width=WIDE, config=SchedulerConfig()).run()
    require_same_weights(by_rank, plain[0])
    assert len({line.partition(": partition")[2].rpartition(":")[0] for line in lines if "trial" in line}) > 2, lines
    assert not [line for line in lines if "failed" in line], lines


def test_delays_at_every_gate_change_nothing() -> None:
    plain = Training(world_size=3, steps=120, width=WIDE, config=SchedulerConfig()).run()
    training = Training(
        world_size=3, steps=120, width=WIDE, config=SchedulerConfig(), open_rank=tuned(TRIALS), delay_seconds=0.0003
    )
    require_same_weights(training.run(), plain[0])


def test_what_is_kept_is_in_use_on_all_ranks_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last windows of the comparison may be of the other one."""
    verdicts: list[Verdict] = []
    done = threading.Event()

    class Recorded(SearchRun):
        def run(self) -> Verdict:
            verdicts.append(super().run())
            done.set()
            return verdicts[0]

    class Rigged(TrialRunner):
        """Measures what it measures, and says that smaller partitions are faster."""

        def measure(self, config: SchedulerConfig, steps: int = 10, *, group: int) -> Window:
            window = super().measure(config, steps, group=group)
            seconds = config.partition_bytes / 1e6
            return replace(window, seconds=seconds, error_seconds=seconds / 100)

    monkeypatch.setattr(search_module, "SearchRun", Recorded)
    monkeypatch.setattr("commsched.session.tuning.TrialRunner", Rigged)
    ended = threading.Event()
    configs: dict[int, SchedulerConfig] = {}

    def note(session: Session, step: int) -> None:
        configs[session.rank] = session.core.config
        if done.is_set() and configs == dict.fromkeys(range(2), verdicts[0].kept):
            ended.set()

    training = Training(
        steps=UNTIL_ENDED, width=WIDE, config=SchedulerConfig(), open_rank=tuned(TRIALS), before_step=note, until=ended
    )
    training.run()
    assert ended.is_set()
    assert verdicts[0].reason == "kept"
    assert verdicts[0].kept.partition_bytes < 4_000_000
    assert configs == dict.fromkeys(range(2), verdicts[0].kept)


def test_a_search_that_breaks_leaves_training_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __init__(self, space: Space) -> None:
            self._searcher = make_searcher("random", space)
            self.tell, self.best = self._searcher.tell, self._searcher.best
            self._asked = 0

        def ask(self) -> Candidate | None:
            self._asked += 1
            if self._asked == 3:
                raise ZeroDivisionError("a bug")
            return self._searcher.ask()

    monkeypatch.setattr(search_module, "make_searcher", lambda name, space, **_: Broken(space))
    incumbent, ended = SchedulerConfig(70_000, 70_000), threading.Event()
    configs: dict[tuple[int, int], SchedulerConfig] = {}

    def note(session: Session, step: int) -> None:
        configs[session.rank, step] = session.core.config
        if step > 20 and session.rank == 0 and not tuner_threads() and session.core.config == incumbent:
            ended.set()

    def train(**how: Any) -> tuple[list[Weights], int]:
        training = Training(width=WIDE, config=incumbent, **how)
        return training.run(), training.taken

    with caplog.at_level(logging.ERROR, "commsched"):
        by_rank, taken = train(steps=5000, open_rank=tuned(TRIALS), before_step=note, until=ended)
    require_same_weights(by_rank, train(steps=taken)[0][0])
    [record] = caplog.records
    assert record.getMessage() == "the tuner failed; training goes on as before"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert len({configs[0, step] for step in range(taken)}) > 1
    assert taken < 5000  # it came back to what it was
    assert configs[0, taken - 1] == configs[1, taken - 1] == incumbent


@pytest.mark.parametrize("steps", [1, 4, 9, 15, 25, 40])
def test_training_that_ends_in_the_middle_ends_at_once(steps: int) -> None:
    lines: list[str] = []
    settings = Settings(tune=Budget(trials=100), tune_by="random")
    training = Training(steps=steps, width=WIDE, config=SchedulerConfig(), open_rank=tuned(settings, lines.append))
    require_same_weights(training.run(), Training(steps=steps, width=WIDE, config=SchedulerConfig()).run()[0])
    assert not [line for line in lines if "ended first" not in line and "trial" not in line], lines
    if steps == 40:
        assert "not finished; partition 4.0 MB, credit 16.0 MB kept" in lines[-1]


def test_a_job_that_fails_while_it_is_tuned_ends_with_the_cause() -> None:
    told: dict[int, str] = {}

    def boom(session: Session, step: int) -> None:
        if step == 30 and session.rank == 1:
            raise ValueError("boom")

    def listen(session: Session) -> None:
        session.when_failed(lambda error: told.update({session.rank: f"{type(error).__name__}: {error}"}))
        tuned(TRIALS)(session)

    training = Training(world_size=3, steps=5000, width=WIDE, config=SchedulerConfig(), open_rank=listen, before_step=boom)
    with pytest.raises((ValueError, commsched.TransportError), match="boom"):
        training.run()
    assert told == dict.fromkeys(range(3), "TransportError: rank 1 ended: ValueError: boom")


def test_a_rank_that_leaves_early_is_named_as_ever() -> None:
    class Enough(Exception):
        pass

    def leave(session: Session, step: int) -> None:
        if step == 30 and session.rank == 1:
            session.close()
            raise Enough

    training = Training(steps=5000, width=WIDE, config=SchedulerConfig(), open_rank=tuned(TRIALS), before_step=leave)
    with pytest.raises(commsched.PeerLost, match=r"rank 1 left"):
        training.run()


# --- what is asked for ---


def starting(settings: Settings, **how: Any) -> list[str]:
    """What each rank says that refuses to start."""
    errors: list[str] = []

    def open_rank(session: Session) -> None:
        try:
            tuned(settings)(session)
        except commsched.CommschedError as error:
            errors.append(f"{type(error).__name__}: {error}")

    Training(world_size=3, steps=1, open_rank=open_rank, **how).run()
    return errors


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(TRIALS, tune_by="magic"), "ConfigError: tune_by='magic' is unknown; there are: bayes, grid, random, sgd"),
        (
            replace(TRIALS, tune_out="/nowhere/tuned.toml"),
            "ConfigError: tune_out='/nowhere/tuned.toml': there is no such directory",
        ),
        (
            replace(
                TRIALS,
                partition=4_000_000,
                credit=16_000_000,
                tune_by="sgd",
                tune_policies=("fifo", "priority"),
                given=frozenset({"partition", "credit"}),
            ),
            "ConfigError: tune_by='sgd' follows slopes, and policies have none; only the policy is free",
        ),
        (replace(TRIALS, tune_out="tuned.jsonl"), "ConfigError: tune_out='tuned.jsonl' is the name of its journal; write it"),
    ],
)
def test_what_cannot_be_tuned_is_said_by_all_ranks_before_training(settings: Settings, message: str) -> None:
    errors = starting(settings)
    assert len(errors) == 3
    assert errors[0].startswith(message)
    assert len(set(errors)) == 1


def test_a_missing_library_is_said_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "skopt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "skopt", None)
    errors = starting(replace(TRIALS, tune_by="bayes"))
    assert len(errors) == 3
    assert 'pip install "commsched[tune]"' in errors[0]
    assert len(set(errors)) == 1


def test_what_a_user_has_set_is_not_chosen() -> None:
    lines: list[str] = []
    settings = replace(TRIALS, partition=4_000_000, credit=16_000_000, given=frozenset({"partition", "credit", "transport"}))
    Training(steps=20, width=WIDE, config=SchedulerConfig(), open_rank=tuned(settings, lines.append)).run()
    assert lines == ["tuning: nothing is left to choose; partition, credit and policy are given, or the model is too small"]
    assert fixed_by(replace(settings, given=frozenset({"policy"}))) == {"policy"}
    assert fixed_by(replace(settings, given=frozenset({"policy"}), tune_policies=("fifo",))) == set()


@pytest.mark.parametrize(("world_size", "disable", "why"), [(1, False, "one rank"), (2, True, "disable=1")])
def test_one_rank_has_nothing_to_tune(
    world_size: int, disable: bool, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("commsched.session.opening.say", said.append)
    with open_session(World(0, world_size, 0, world_size, "threads"), replace(TRIALS, disable=disable)) as session:
        assert session.world_size == 1
    assert said == [f"there is nothing to tune with {why}"]


@pytest.mark.parametrize("order", ["agreed", "static"])
def test_a_static_order_has_time_to_come_back(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[dict[str, int]] = []
    static: list[bool] = []  # before each step of rank 0

    class Spy(OnlineTuner):  # rank 0's
        def on_switch(self, window: Mapping[str, Any], steps: Mapping[int, int]) -> None:
            windows.append({**window, "first": steps[window["group"]]})
            super().on_switch(window, steps)

    monkeypatch.setattr("commsched.session.tuning.OnlineTuner", Spy)

    def note(session: Session, step: int) -> None:
        if session.rank == 0:
            static.append(session.core.is_static)

    training = Training(
        steps=80,
        width=WIDE,
        config=SchedulerConfig(order=order),
        open_rank=tuned(replace(TRIALS, order=order)),
        before_step=note,
        wrap_transport=Ordered,
    )
    training.run()
    assert windows[0]["settle"] == (10 if order == "static" else 3)
    assert windows[0]["steps"] == 10
    assert len(windows) >= 2
    assert [window["trial"] for window in windows] == list(range(len(windows)))
    for window in windows:
        begin = window["first"] + window["settle"]
        counted = static[begin + 1 : begin + 1 + window["steps"]]
        assert counted == [order == "static"] * len(counted)


@pytest.mark.parametrize(("one_per_host", "workers"), [(False, 4), (True, 2)])
def test_with_a_hierarchy_each_host_is_one_worker_of_the_network(one_per_host: bool, workers: int) -> None:
    transport = SimpleNamespace(ordered=False, one_per_host=one_per_host, servers=3)
    session: Any = SimpleNamespace(world_size=4, transport=transport)
    job = facts_of(session, TRIALS, "ps", "a", 2)
    assert (job.world_size, job.hosts, job.workers, job.shards) == (4, 2, workers, 3)


# --- files ---


def train_until_tuned(out: Path, config: SchedulerConfig | None = None) -> tuple[list[Weights], list[str]]:
    """The weights, and what was said."""
    lines: list[str] = []
    ended = threading.Event()

    def end(session: Session, step: int) -> None:
        if step > 20 and session.rank == 0 and (out.exists() or not tuner_threads()):
            ended.set()

    settings = Settings(tune=Budget(trials=3), tune_by="grid", tune_out=str(out))
    training = Training(
        steps=UNTIL_ENDED,
        width=WIDE,
        config=config or SchedulerConfig(),
        open_rank=tuned(settings, lines.append),
        before_step=end,
        until=ended,
    )
    return training.run(), lines


def test_the_result_is_written_and_the_next_start_measures_nothing(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    _, lines = train_until_tuned(out)
    journal = (tmp_path / "tuned.jsonl").read_bytes()
    assert journal.count(b'"phase": "search"') == 3, lines
    settings = Settings.load({}, {"COMMSCHED_CONFIG": str(out)})
    assert settings.tuned is not None
    assert settings.tuned["transport"] == "local"
    assert settings.tuned["link"] == "loopback"
    assert settings.tuned["hosts"] == 1
    out.unlink()
    _, lines = train_until_tuned(out)
    assert out.exists()
    assert (tmp_path / "tuned.jsonl").read_bytes() == journal


def test_a_journal_of_another_search_is_left_alone_and_so_is_training(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    train_until_tuned(out)
    out.unlink()
    journal = (tmp_path / "tuned.jsonl").read_bytes()
    by_rank, lines = train_until_tuned(out, SchedulerConfig(65_000, 130_000))
    assert len(lines) == 1
    assert "is of another search: from is" in lines[0]
    assert (tmp_path / "tuned.jsonl").read_bytes() == journal
    require_same_weights(by_rank, by_rank[0])


# --- the model ---


def asked_with(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a searcher was made with."""
    found: dict[str, Any] = {}
    made = threading.Event()

    def spy(name: str, space: Space, **how: Any) -> Any:
        if how:
            found.update(how)
            if how["model"] is not None:  # it ends with the search
                found["times"] = [how["model"].predict(config) for config in space.lattice()]
            made.set()
        return make_searcher(name, space, **how)

    monkeypatch.setattr(search_module, "make_searcher", spy)
    settings = replace(TRIALS, tune_by="bayes")
    training = Training(steps=UNTIL_ENDED, width=WIDE, config=SchedulerConfig(), open_rank=tuned(settings), until=made)
    training.run()
    return found


def test_a_searcher_is_given_what_some_steps_have_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked_with(monkeypatch)
    assert 1 <= len(found["seeds"]) <= 3
    assert all(0 < seconds < 60 for seconds in found["times"])


def test_without_a_model_it_is_tuned_all_the_same(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("commsched.tuner.learn.ModelProcess", broken)
    found = asked_with(monkeypatch)
    assert (found["seeds"], found["model"]) == ([], None)
    assert caplog.messages.count("tuning goes on without a model: ZeroDivisionError: a bug") == 1


# --- after tuning ---


class Counted(TuningJob):
    """Ends at once with one of these verdicts after the other, and remembers how it was asked."""

    def __init__(self, *reasons: Reason | None) -> None:
        self.asked: list[tuple[int, bool]] = []
        self.reasons = reasons
        self.called = threading.Semaphore(0)
        self.kept = BEFORE

    def run(self, group: int, manifest: Manifest, again: bool) -> Verdict | None:
        self.asked.append((group, again))
        reason = self.reasons[len(self.asked) - 1]
        self.called.release()
        kept = SchedulerConfig(1_000_000 * len(self.asked)) if reason == "kept" else BEFORE
        incumbent = self.kept if again else BEFORE
        self.kept = kept
        return None if reason is None else Verdict(reason, kept, incumbent, kept, 3, 2, 100, 1.0)


BEFORE = SchedulerConfig()


class Watched:
    """A tuner on two groups, the second larger, with steps that the test makes."""

    def __init__(
        self,
        *reasons: Reason | None,
        first_sizes: Callable[[Manifest, SchedulerConfig], SchedulerConfig] = lambda manifest, config: config,
    ) -> None:
        self.meter, self.search = StepTimer(lambda report: None), Counted(*reasons)
        self.lines: list[str] = []
        self.ends: list[str] = []
        self.applied: list[SchedulerConfig] = []
        self.drifts: list[DriftDetector] = []
        self.rests: list[int] = []
        self.meter.add_group(0, manifest(5))
        self.meter.add_group(1, manifest(500))
        self.trials = TrialRunner(self, self.meter.main_group, 3)
        job = JobFacts(2, "ps", False, "127.0.0.1", 1, 2)
        learner = Learner(job, self.meter, lambda observer: lambda: None, lambda: None)
        context = TuningContext(
            *(TRIALS, job, self.meter, self.trials, learner, lambda: BEFORE, self.lines.append), first_sizes=first_sizes
        )
        self.tuner = OnlineTuner(context, lambda *how: self.search.run(*how), self.ends.append, make_drift=self._make_drift)
        self.tuner.start()

    world_size = 2

    def reconfigure(self, config: SchedulerConfig, window: Any = None) -> None:
        assert window is None  # trials are not these tests'
        self.applied.append(config)

    def _make_drift(self, rest_steps: int) -> DriftDetector:
        self.rests.append(rest_steps)
        self.drifts.append(DriftDetector(window_steps=2, windows=3))
        return self.drifts[-1]

    def begin(self, group: int) -> Engine:
        engine = Engine(self.meter, group)
        engine.steps(*[1.0] * 5)
        return engine

    def require_searched(self) -> None:
        assert self.search.called.acquire(timeout=60)

    def end(self) -> None:
        self.tuner.close(wait=True)
        assert tuner_threads() == []


def test_steps_that_have_become_slower_to_stay_are_tuned_again() -> None:
    watched = Watched("no gain", "kept", "failed")
    engine, drifts = watched.begin(0), watched.drifts
    for now in (1.0, 2.0):
        watched.require_searched()
        while not drifts or drifts[-1].before_seconds == 0.0:  # until it watches, nothing is told
            engine.steps(now)
        engine.steps(*[2 * now] * 10)
    watched.require_searched()
    watched.end()
    assert watched.search.asked == [(0, False), (0, True), (0, True)]
    assert watched.rests == [1000, 2000]
    assert watched.lines == [
        "steps take 2000 ms now, and took 1000 ms before: choosing again",
        "steps take 4000 ms now, and took 2000 ms before: choosing again",
    ]
    assert len(watched.ends) == 1
    assert "too many trials in a row failed" in watched.ends[0]


def test_each_stage_of_a_job_is_tuned_with_what_was_there_before() -> None:
    watched = Watched("kept", "kept")
    watched.begin(0)
    watched.require_searched()
    engine = watched.begin(1)  # larger, so that the first is not waited for
    watched.require_searched()
    engine.steps(*[1.0] * 10)
    watched.end()
    assert watched.search.asked == [(0, False), (1, False)]
    assert watched.applied == [BEFORE]
    assert watched.lines == ["other tensors are trained now"]
    assert watched.ends == []


def test_a_later_stage_begins_with_sizes_of_its_own() -> None:
    def first_sizes(described: Manifest, config: SchedulerConfig) -> SchedulerConfig:
        return replace(config, partition_bytes=100 * described.nbytes)

    watched = Watched("kept", "kept", first_sizes=first_sizes)
    watched.begin(0)
    watched.require_searched()
    watched.begin(1)
    watched.require_searched()
    watched.end()
    assert watched.applied == [replace(BEFORE, partition_bytes=100 * manifest(500).nbytes)]


def test_where_nothing_is_chosen_nothing_is_said_of_other_tensors() -> None:
    watched = Watched(None, None)
    watched.begin(0)
    watched.require_searched()
    engine = watched.begin(1)
    watched.require_searched()
    engine.steps(*[1.0] * 10)
    watched.end()
    assert watched.search.asked == [(0, False), (1, False)]
    assert (watched.lines, watched.applied) == ([], [])


def test_a_stage_after_a_second_search_begins_with_what_was_there_before_the_first() -> None:
    watched = Watched("kept", "kept", "kept")
    engine, drifts = watched.begin(0), watched.drifts
    watched.require_searched()
    while not drifts or drifts[-1].before_seconds == 0.0:  # until it watches, nothing is told
        engine.steps(1.0)
    engine.steps(*[2.0] * 10)
    watched.require_searched()
    watched.begin(1)
    watched.require_searched()
    watched.end()
    assert watched.search.asked == [(0, False), (0, True), (1, False)]
    assert watched.applied == [BEFORE]


def test_a_stage_that_comes_back_has_what_was_found_for_it() -> None:
    watched = Watched("kept", "kept")
    large = watched.begin(1)
    watched.require_searched()
    small = watched.begin(0)
    small.steps(*[1.0] * 500)  # the large one has had its last step, it seems
    watched.require_searched()
    large.steps(1.0)
    wait_until(lambda: len(watched.applied) == 2)
    watched.end()
    assert watched.search.asked == [(1, False), (0, False)]
    assert watched.applied == [BEFORE, SchedulerConfig(1_000_000)]


def test_where_there_is_nothing_to_choose_a_later_stage_is_waited_for() -> None:
    watched = Watched(None, "kept")
    watched.begin(0)
    watched.require_searched()
    wait_until(lambda: watched.ends == ["nothing is left to choose"])
    watched.begin(1)
    watched.require_searched()
    watched.end()
    assert watched.search.asked == [(0, False), (1, False)]


def test_a_group_that_comes_and_goes_in_the_middle_of_its_searches_is_left_alone() -> None:
    watched = Watched(*["unfinished"] * 3, "kept")
    watched.begin(0)
    for _ in range(3):
        watched.require_searched()
    watched.begin(1)
    watched.require_searched()
    watched.end()
    assert watched.search.asked == [(0, False)] * 3 + [(1, False)]
    assert watched.applied == [BEFORE] * 4
    assert watched.ends == []


def test_a_search_that_tried_nothing_is_not_made_again() -> None:
    watched = Watched("no gain")
    watched.search.run = lambda group, manifest, again=False: Verdict(  # type: ignore[method-assign]
        "no gain", BEFORE, BEFORE, BEFORE, 1, 0, 13, 1.0
    )
    watched.begin(0)
    wait_until(lambda: not tuner_threads())
    watched.end()
    assert watched.ends == ["1 trials, 1 s: no gain, nothing was tried; partition 4.0 MB, credit 16.0 MB kept"]


def test_a_search_that_is_not_possible_is_told_to_who_waits_for_its_end(tmp_path: Path) -> None:
    settings = replace(TRIALS, tune_out=str(tmp_path / "tuned.toml"), tune_end=str(tmp_path / "end"))
    (tmp_path / "tuned.jsonl").write_text("# notes\n")
    ended, lines = threading.Event(), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        ended.set()

    Training(steps=UNTIL_ENDED, width=WIDE, config=SchedulerConfig(), open_rank=tuned(settings, say), until=ended).run()
    [line] = lines
    assert "line 1, is not a line of a journal of tuning" in line
    assert (tmp_path / "end").read_text() == f"ConfigError: {line.removeprefix('tuning: not possible: ')}\n"


def test_a_job_of_two_stages_is_tuned_for_both(tmp_path: Path) -> None:
    out, first, second = tmp_path / "tuned.toml", threading.Event(), threading.Event()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if ": partition" in line or ": no gain" in line:  # a verdict; the journal has the trials
            (second if first.is_set() else first).set()

    settings = Settings(tune=Budget(trials=2), tune_by="random", tune_out=str(out))
    training = Training(
        steps=UNTIL_ENDED,
        width=WIDE,
        config=SchedulerConfig(),
        open_rank=tuned(settings, say),
        until=first,
        later=((2 * WIDE, second),),
    )
    by_rank = training.run()
    assert second.is_set(), lines
    assert "other tensors are trained now" in lines
    require_same_weights(by_rank, by_rank[0])
    verdicts = [
        record
        for record in map(json.loads, (tmp_path / "tuned.jsonl").read_text().splitlines())
        if record["phase"] == "verdict"
    ]
    assert len(verdicts) == 2
    assert verdicts[0]["incumbent"] == SchedulerConfig().to_record()
    assert verdicts[1]["incumbent"]["partition_bytes"] < 1_000_000  # what its own tensors begin with
    table = Settings.load({}, {"COMMSCHED_CONFIG": str(out)}).tuned
    assert table is not None
    assert table["model"] == verdicts[1]["key"]["model"] != verdicts[0]["key"]["model"]
    assert len(table["groups"]) == 2


@pytest.mark.parametrize("wait", [False, True])
def test_a_searcher_that_takes_long_does_not_hold_up_the_end(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commsched.tuner.online._END_SECONDS", 0.05)
    computed = threading.Event()

    class Slow(Counted):
        def run(self, group: int, manifest: Manifest, again: bool = False) -> Verdict | None:
            self.called.release()
            computed.wait(60)
            raise Stopped("the session closes")  # as at its next trial

    watched = Watched()
    watched.search.__class__ = Slow
    watched.begin(0)
    watched.require_searched()
    watched.tuner.close(wait)
    assert tuner_threads()
    computed.set()
    watched.end()
    assert (watched.lines, watched.ends) == ([], [])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)  # the tuner's thread tells nobody that it waits


# --- real processes ---


def test_a_searcher_that_is_not_there_ends_the_start_of_a_real_job() -> None:
    code, out, err = run_job(
        *("-n", "2", "--transport", "ps", *worker("5")),
        environ={"COMMSCHED_TUNE": "1", "COMMSCHED_TUNE_BY": "magic"},
        patient=True,
    )
    assert code == 1
    assert "pid" not in out
    assert err.count("ConfigError: tune_by='magic' is unknown; there are: bayes, grid, random, sgd") == 2, err
