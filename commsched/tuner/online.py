"""Tuning while training runs: what :func:`start_tuning` adds to a session, and rank 0's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..core.config import SchedulerConfig, Settings
from ..core.core import Core
from ..core.errors import ClosedError, CommschedError, from_record, to_record
from ..core.manifest import Manifest
from ..core.order.pattern import SLACK, STABLE_STEPS
from ..core.ports import Observer, Transport
from .drift import Drift
from .meter import Meter
from .trials import Trials

if TYPE_CHECKING:
    from .search import Search  # which needs what searchers need

log = logging.getLogger("commsched")

#: Steps before anything is measured: caches fill, memory is allocated, engines choose their kernels.
WARM_UP_STEPS = 5

#: Steps that what was sent before a change of configuration, and what waits because of it, may still be felt in.
SETTLE_STEPS = 3

#: Before it is tuned for a second time; then twice as many each time, so that step times that are never the same cost little.
REST_STEPS = 1000

#: What a searcher or a model computes is not interrupted; it takes a few seconds at most.
_END_SECONDS = 30.0


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
    step times stay what they were. Whatever happens in it, training goes on.

    Args:
        make_drift: given the steps that must pass in any case, what tells that it is time to tune again.
    """

    def __init__(
        self,
        meter: Meter,
        trials: Trials,
        search: Search,
        say: Callable[[str], None],
        make_drift: Callable[[int], Drift] = lambda rest_steps: Drift(rest_steps=rest_steps),
    ) -> None:
        self._meter = meter
        self._trials = trials
        self._search = search
        self._say = say
        self._make_drift = make_drift
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

    def close(self) -> None:
        self._stop("the session closes")
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            log.warning("the tuner has not ended within %g s; it is left behind", _END_SECONDS)

    def _stop(self, why: str) -> None:
        self._trials.stop(why)
        self._meter.close()

    # --- the thread ---

    def _run(self) -> None:
        main = self._meter.wait_until_training(WARM_UP_STEPS)
        again, rest_steps = False, REST_STEPS
        while main is not None:
            try:
                verdict = self._search.run(*main, again=again)
            except Exception as error:
                self._give_up(error)
                return
            if verdict is None or verdict.reason in ("failed", "unfinished"):
                return
            again, drift = True, self._make_drift(rest_steps)
            rest_steps *= 2
            if not self._meter.wait_for_drift(main[0], drift):
                return
            self._say(
                f"tuning: steps take {drift.now_seconds * 1e3:.3g} ms now, and took {drift.before_seconds * 1e3:.3g} ms when "
                "tuning had ended: once more"
            )

    def _give_up(self, error: Exception) -> None:
        """The configuration that was there before the search is in use again, or soon will be."""
        if self._trials.stopped is not None or isinstance(error, ClosedError):
            log.debug("the tuner ended with the session", exc_info=error)
        elif isinstance(error, CommschedError):
            self._say(f"tuning: not possible: {error}")
        else:
            log.error("the tuner broke; training goes on as before", exc_info=error)


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
    search = Search(settings, job, meter, trials, lambda: session.core.config, session.observe, say)
    tuner = OnlineTuner(meter, trials, search, say)
    session.use_tuner(tuner)
    session.when_failed(tuner.on_failure)
    tuner.start()


def _refusal(settings: Settings, core: Core) -> dict[str, str] | None:
    """Why rank 0 cannot tune, for all ranks."""
    from .search import require_possible

    try:
        require_possible(settings, core)
    except CommschedError as error:
        return to_record(error)
    return None
