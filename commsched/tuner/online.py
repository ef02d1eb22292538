"""Tuning while training runs: what :func:`start_tuning` adds to a session, and rank 0's thread."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..core.config import SchedulerConfig, Settings
from ..core.core import Core
from ..core.errors import ClosedError, CommschedError, from_record, to_record
from ..core.manifest import Manifest
from ..core.order.pattern import SLACK, STABLE_STEPS
from ..core.ports import Observer, Transport
from .drift import Drift
from .meter import Meter
from .text import milliseconds
from .trial import Stopped
from .trials import Trials
from .verdict import Verdict

if TYPE_CHECKING:
    from .search import Search  # which needs what searchers need

log = logging.getLogger("commsched")

#: Steps before anything is measured: caches fill, memory is allocated, engines choose their kernels.
WARM_UP_STEPS = 5

#: Steps that what was sent before a change of configuration, and what waits because of it, may still be felt in.
SETTLE_STEPS = 3

#: Before it is tuned for a second time; then twice as many each time, so that step times that are never the same cost little.
REST_STEPS = 1000

#: For the tuner's thread, when the session closes. What a searcher computes is not interrupted and may take longer; it is of no
#: use then, and can do nothing with it.
_END_SECONDS = 2.0

#: Searches that end because another group is trained, after which that group is tuned no more: training goes to and fro.
_MOST_CUT_OFF = 3


class Session(Protocol):
    """What tuning needs of a session; see ``session.py``."""

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
    """Rank 0's tuner (``session.Tuner``): a thread that waits for training to be under way, searches, and then watches whether
    step times stay what they were, and whether it is still the same tensors that are trained. Whatever happens in it, training
    goes on.

    Args:
        say: takes lines for the user.
        end: is told why nothing more is searched for, where that left no result.
        make_drift: given the steps that must pass in any case, what tells that it is time to tune again.
    """

    def __init__(
        self,
        meter: Meter,
        trials: Trials,
        search: Search,
        say: Callable[[str], None],
        end: Callable[[str], None] = lambda why: None,
        make_drift: Callable[[int], Drift] = lambda rest_steps: Drift(rest_steps=rest_steps),
    ) -> None:
        self._meter = meter
        self._trials = trials
        self._search = search
        self._say = say
        self._end = end
        self._make_drift = make_drift
        self._rest_steps = REST_STEPS
        self._before: SchedulerConfig | None = None  # what was in use before any search
        self._kept: dict[int, SchedulerConfig] = {}  # by group: what a search has ended with
        self._drifted: int | None = None  # a group whose steps have become slower, or faster, since
        self._left_alone: set[int] = set()  # groups that there is nothing to choose for, or that come and go
        self._cut_off: Counter[int] = Counter()  # searches, by group
        self._thread = threading.Thread(target=self._run, name="commsched-tuner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- session.Tuner ---

    def on_switch(self, window: Mapping[str, Any], steps: Mapping[int, int]) -> None:
        self._meter.on_switch(window, steps)

    def on_told(self, rank: int, value: Any) -> None:
        self._trials.on_told(rank, value)

    def on_leave(self, rank: int) -> None:
        self._stop(f"rank {rank} has left")

    def on_failure(self, error: CommschedError) -> None:
        """The job failed."""
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
                        continue  # with whatever is trained now
                self._drifted = None
                if not self._watch(group):
                    return
        except Exception as error:
            self._give_up(error)

    def _goes_on(self, group: int, verdict: Verdict | None) -> bool:
        """After a search: whether there may be another."""
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
        if verdict.reason != "unfinished":  # nor would the next one come to anything
            self._end(verdict.sentence().removeprefix("tuning: "))
            return False
        self._cut_off[group] += 1
        if self._cut_off[group] == _MOST_CUT_OFF:
            self._left_alone.add(group)
        self._on_other_group()
        return True

    def _watch(self, group: int) -> bool:
        """Until there is a reason to tune again. False: the session closes."""
        drift = self._make_drift(self._rest_steps) if group in self._kept and group not in self._left_alone else None
        if not self._meter.wait_for_change(group, drift):
            return False
        if drift is not None and drift.found:
            self._drifted = group
            self._rest_steps *= 2
            now, before = milliseconds(drift.now_seconds), milliseconds(drift.before_seconds)
            self._say(f"tuning: steps take {now} ms now, and took {before} ms when tuning had ended: once more")
        else:
            self._on_other_group()
        return True

    def _on_other_group(self) -> None:
        """What was found for one group is not known to be good for another."""
        main = self._meter.main_group()
        self._say("tuning: other tensors are trained now")
        config = self._before if main is None else self._kept.get(main, self._before)
        if config is not None:
            self._trials.apply(config)

    def _give_up(self, error: Exception) -> None:
        """The configuration that was there before the search is in use again, or soon will be."""
        if self._trials.stopped is not None or isinstance(error, (ClosedError, Stopped)):
            log.debug("the tuner ended with the session", exc_info=error)
            return
        if isinstance(error, CommschedError):
            self._say(f"tuning: not possible: {error}")
        else:
            log.error("the tuner broke; training goes on as before", exc_info=error)
        self._end(f"{type(error).__name__}: {error}")


def start_tuning(
    session: Session,
    settings: Settings,
    transport: str,
    host: str,
    say: Callable[[str], None],
    *,
    leads_host: bool = False,
) -> None:
    """Have every rank measure, and rank 0 tune. Collective; before the first group is registered.

    Args:
        transport: its name. host: this rank's address.
        say: takes lines for the user.
        leads_host: one rank of each host uses the network for all of them.

    Raises:
        ConfigError, UnsupportedError: what is asked for cannot be done; the same on all ranks.
    """
    refusal = _refusal(settings, session.core) if session.rank == 0 else None
    answers = session.gather({"host": host, "refusal": refusal})
    if answers[0]["refusal"] is not None:
        raise from_record(answers[0]["refusal"])
    meter = Meter(session.tell_tuner)
    session.on_register(meter.add_group)
    session.observe(meter)
    if session.rank != 0:
        session.use_tuner(meter)
        return
    from .search import Job, Search

    # Each agreed change ends a static order, which comes back only when readiness has repeated itself for some steps.
    is_static = settings.order == "static" and session.transport.ordered
    settle_steps = STABLE_STEPS + SLACK + 3 if is_static else SETTLE_STEPS
    trials = Trials(session, meter.main_group, settle_steps)
    hosts = len({answer["host"] for answer in answers})
    workers = hosts if leads_host else session.world_size
    job = Job(session.world_size, transport, session.transport.ordered, host, hosts, workers)
    # What was applied may not be in use yet.
    search = Search(settings, job, meter, trials, lambda: trials.applied or session.core.config, session.observe, say)
    tuner = OnlineTuner(meter, trials, search, say, partial(_tell_end, settings.tune_end))
    session.use_tuner(tuner)
    session.when_failed(tuner.on_failure)
    tuner.start()


def _tell_end(path: str | None, why: str) -> None:
    """In one line of the file ``path``, for who waits for a tuned file: there is none, and none comes."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(" ".join(why.split()) + "\n")
    except OSError as error:
        log.warning("who started this job is not told that tuning has ended: %s", error)


def _refusal(settings: Settings, core: Core) -> dict[str, str] | None:
    """Why rank 0 cannot tune, for all ranks."""
    from .search import require_possible

    try:
        require_possible(settings, core)
    except CommschedError as error:
        return to_record(error)
    return None
