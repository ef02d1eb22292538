"""Tuning while training runs: :func:`start_tuning` adds it to a session; rank 0 runs it in a thread."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..core.config import SchedulerConfig
from ..core.core import Core
from ..core.errors import ClosedError, CommschedError, from_record, to_record
from ..core.interfaces import Observer, Transport
from ..core.manifest import Manifest
from ..core.order.static import SLACK, STABLE_STEPS
from ..settings import Settings
from .format import milliseconds
from .meter import StepTimer
from .result import Verdict
from .stats import DriftDetector
from .trials import Stopped, TrialRunner

if TYPE_CHECKING:
    from .job import TuningJob  # imports the searchers' dependencies

log = logging.getLogger("commsched")

#: Steps before the first measurement: caches fill, memory is allocated, engines choose their kernels.
WARM_UP_STEPS = 5

#: Steps after a change of configuration that may still be affected by communication from before it.
SETTLE_STEPS = 3

#: Steps before a second search. The number doubles each time, so that training whose step times never settle loses little.
REST_STEPS = 1000

#: Time limit for the tuner's thread when the session closes. A searcher's computation is not interrupted and may take longer;
#: its result is then discarded.
_END_SECONDS = 2.0

#: A group is not tuned any more after this many searches for it ended because another group was trained: training alternates
#: between groups.
_MAX_CUT_OFF = 3


class TunableSession(Protocol):
    """The part of a session that tuning needs; see ``session/session.py``."""

    rank: int
    world_size: int

    @property
    def core(self) -> Core: ...

    @property
    def transport(self) -> Transport: ...

    def gather(self, value: Any) -> list[Any]: ...

    def reconfigure(self, config: SchedulerConfig, window: Any = None) -> None: ...

    def tell_tuner(self, value: Any) -> None: ...

    def use_tuner(self, tuner: Any) -> None: ...

    def observe(self, observer: Observer) -> Callable[[], None]: ...

    def on_register(self, callback: Callable[[int, Manifest], None]) -> None: ...

    def when_failed(self, callback: Callable[[CommschedError], None]) -> None: ...


class OnlineTuner:
    """Rank 0's tuner (``session.events.Tuner``). Its thread waits until training is under way, searches, and then watches
    whether step times change and whether other tensors are trained. Errors in the thread do not stop training.

    Args:
        say: prints a line for the user.
        end: is called with the reason when no further search follows and there is no result.
        make_drift: makes the detector that decides when to tune again, given the steps that must pass first.
    """

    def __init__(
        self,
        meter: StepTimer,
        trials: TrialRunner,
        search: TuningJob,
        say: Callable[[str], None],
        end: Callable[[str], None] = lambda why: None,
        make_drift: Callable[[int], DriftDetector] = lambda rest_steps: DriftDetector(rest_steps=rest_steps),
    ) -> None:
        self._meter = meter
        self._trials = trials
        self._search = search
        self._say = say
        self._end = end
        self._make_drift = make_drift
        self._rest_steps = REST_STEPS
        self._before: SchedulerConfig | None = None  # in use before any search
        self._kept: dict[int, SchedulerConfig] = {}  # by group: the result of its last search
        self._drifted: int | None = None  # a group whose steps have become slower or faster since its search
        self._left_alone: set[int] = set()  # groups with nothing to choose, or that come and go
        self._cut_off: Counter[int] = Counter()  # by group: searches that another group cut off
        self._thread = threading.Thread(target=self._run, name="commsched-tuner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- session.events.Tuner ---

    def on_switch(self, window: Mapping[str, Any], steps: Mapping[int, int]) -> None:
        self._meter.on_switch(window, steps)

    def on_message(self, rank: int, value: Any) -> None:
        self._trials.on_message(rank, value)

    def on_leave(self, rank: int) -> None:
        self._stop(f"rank {rank} has left")

    def on_failure(self, error: CommschedError) -> None:
        """Stop, because the job failed."""
        self._stop(str(error))

    def close(self, wait: bool) -> None:
        self._stop("the session closes")
        if wait:
            self._thread.join(_END_SECONDS)

    def _stop(self, why: str) -> None:
        self._trials.stop(why)
        self._meter.close()
        self._search.stop()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while (main := self._meter.wait_until_training(WARM_UP_STEPS)) is not None:
                group, manifest = main
                if group not in self._left_alone and (group not in self._kept or group == self._drifted):
                    verdict = self._search.run(group, manifest, again=group == self._drifted)
                    if not self._goes_on(group, verdict):
                        return
                    if verdict is not None and not verdict.finished:
                        continue  # with the group that is trained now
                self._drifted = None
                if not self._watch(group):
                    return
        except Exception as error:
            self._give_up(error)

    def _goes_on(self, group: int, verdict: Verdict | None) -> bool:
        """Process the verdict of a search. Returns whether another search may follow."""
        if verdict is None:
            self._left_alone.add(group)
            self._end("nothing is left to choose")
            return True
        self._before = self._before or verdict.incumbent
        if verdict.finished:
            self._kept[group] = verdict.kept
            return True
        if self._trials.stopped is not None:
            return False
        if verdict.reason != "unfinished":  # another search would fail too
            self._end(verdict.sentence().removeprefix("tuning: "))
            return False
        self._cut_off[group] += 1
        if self._cut_off[group] == _MAX_CUT_OFF:
            self._left_alone.add(group)
        self._on_other_group()
        return True

    def _watch(self, group: int) -> bool:
        """Wait until there is a reason to tune again. Returns False if the session closes."""
        drift = self._make_drift(self._rest_steps) if group in self._kept and group not in self._left_alone else None
        if not self._meter.wait_for_change(group, drift):
            return False
        if drift is not None and drift.found:
            self._drifted = group
            self._rest_steps *= 2
            now, before = milliseconds(drift.now_seconds), milliseconds(drift.before_seconds)
            self._say(f"tuning: steps take {now} ms now, and took {before} ms when tuning had ended: tuning again")
        else:
            self._on_other_group()
        return True

    def _on_other_group(self) -> None:
        """Apply the main group's own result, or else the configuration from before any search: the result of one group may not
        be good for another."""
        main = self._meter.main_group()
        self._say("tuning: other tensors are trained now")
        config = self._before if main is None else self._kept.get(main, self._before)
        if config is not None:
            self._trials.apply(config)

    def _give_up(self, error: Exception) -> None:
        """Report why the tuner ended. The search has already applied the configuration from before it; all ranks use it from a
        later step on."""
        if self._trials.stopped is not None or isinstance(error, (ClosedError, Stopped)):
            log.debug("the tuner ended with the session", exc_info=error)
            return
        if isinstance(error, CommschedError):
            self._say(f"tuning: not possible: {error}")
        else:
            log.error("the tuner failed; training goes on as before", exc_info=error)
        self._end(f"{type(error).__name__}: {error}")


def start_tuning(
    session: TunableSession,
    settings: Settings,
    transport: str,
    host: str,
    say: Callable[[str], None],
) -> None:
    """Make every rank measure its steps, and rank 0 tune. Collective; call it before the first group is registered.

    Args:
        transport: name of the transport.
        host: this rank's address.
        say: prints a line for the user.

    Raises:
        ConfigError, UnsupportedError: the settings ask for a search that is not possible; raised on all ranks alike.
    """
    refusal = _refusal(settings, session.core) if session.rank == 0 else None
    answers = session.gather({"host": host, "refusal": refusal})
    if answers[0]["refusal"] is not None:
        raise from_record(answers[0]["refusal"])
    meter = StepTimer(session.tell_tuner)
    session.on_register(meter.add_group)
    session.observe(meter)
    if session.rank != 0:
        session.use_tuner(meter)
        return
    from .job import JobFacts, TuningJob

    # Each agreed change ends a static order. The order comes back only after readiness has been the same for several steps.
    is_static = settings.order == "static" and session.transport.ordered
    settle_steps = STABLE_STEPS + SLACK + 3 if is_static else SETTLE_STEPS
    trials = TrialRunner(session, meter.main_group, settle_steps)
    hosts = len({answer["host"] for answer in answers})
    workers = hosts if session.transport.one_per_host else session.world_size
    job = JobFacts(session.world_size, transport, session.transport.ordered, host, hosts, workers)
    # A configuration that was applied may not be in use yet.
    search = TuningJob(settings, job, meter, trials, lambda: trials.applied or session.core.config, session.observe, say)
    tuner = OnlineTuner(meter, trials, search, say, partial(_tell_end, settings.tune_end))
    session.use_tuner(tuner)
    session.when_failed(tuner.on_failure)
    tuner.start()


def _tell_end(path: str | None, why: str) -> None:
    """Append ``why`` as one line to the file ``path``, for a process that waits for a tuned file: none will come."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(" ".join(why.split()) + "\n")
    except OSError as error:
        log.warning("commsched tune gets no notice that tuning has ended: %s", error)


def _refusal(settings: Settings, core: Core) -> dict[str, str] | None:
    """The error because of which rank 0 cannot tune, as a record for all ranks; None if it can."""
    from .job import require_possible

    try:
        require_possible(settings, core)
    except CommschedError as error:
        return to_record(error)
    return None
