"""Adds tuning, or the choice of partition and credit, and the assessment of steps to a session that was just opened."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.core import Core
from ..core.errors import CommschedError, error_text, from_record, to_record
from ..core.manifest import Manifest
from ..settings import Settings
from ..tuner.learn import FirstSizes, JobFacts, Learner, NothingMeasured, TuningContext, is_end, most_seconds_per_byte
from ..tuner.meter import StepTimer
from ..tuner.online import SETTLE_STEPS, OnlineTuner, Search, no_search
from ..tuner.profiler import Measured
from ..tuner.trials import TrialRunner
from .session import Session

log = logging.getLogger("commsched")

#: Steps after which they are assessed at the earliest, and the number of the last ones that count.
ASSESSED_AFTER, ASSESSED_STEPS = 20, 8

#: The most steps for which the assessment waits to know whether a rank is slow: by then there are enough reports.
MOST_MORE_STEPS = 40


def facts_of(session: Session, settings: Settings, transport: str, host: str, hosts: int) -> JobFacts:
    """Where ``session`` trains: over the transport of that name, on ``hosts`` hosts. ``host`` is this rank's address."""
    workers = hosts if session.transport.one_per_host else session.world_size
    ordered, servers = session.transport.ordered, len(settings.servers)
    return JobFacts(
        session.world_size,
        transport,
        ordered,
        host,
        hosts,
        workers,
        servers,
        cores=len(os.sched_getaffinity(0)),
        flows=settings.flows,
        freezes=ordered and session.transport.channels > 1,
        shards=session.transport.servers,
    )


def chooses(settings: Settings, job: JobFacts) -> bool:
    """Whether ``settings`` leaves something to choose: partition, credit, or the order of launches."""
    return settings.chooses_sizes or (job.freezes and settings.order == "auto")


def start_choosing(session: Session, settings: Settings, job: JobFacts, say: Callable[[str], None]) -> None:
    """Choose partition, credit and order as far as ``settings`` leaves them open: the sizes before the first step, and, unless
    the job is tuned, all of them from what rank 0 sees of the first steps. Called on every rank before the first group is
    registered; not collective.

    Args:
        say: prints a line for the user.
    """
    if settings.chooses_sizes:
        first = FirstSizes(job, settings, lambda: session.core.next_config)
        session.choose_first_sizes(first if session.rank == 0 else lambda manifest: None)  # rank 0's answer counts
    if session.rank != 0 or settings.tune is not None or job.workers < 2:
        return
    from ..tuner.auto import AutoChoice  # here: it imports the simulator's dependencies

    meter = _meter(session, lambda report: None)  # there are no windows to report
    context = _context(session, settings, job, meter, say)
    choice = AutoChoice(context)
    _start(session, context, choice.run, lambda why: None, Assessor(session, context, choice.profiled))


def start_assessing(session: Session, settings: Settings, job: JobFacts, say: Callable[[str], None]) -> None:
    """Assess the steps of a session in which nothing is chosen. Called on rank 0 before the first group is registered; not
    collective."""
    meter = _meter(session, lambda report: None)
    context = _context(session, settings, job, meter, say)
    _start(session, context, no_search, lambda why: None, Assessor(session, context))


class Assessor:
    """Says once, on rank 0, what communication costs in the running training, and keeps that for ``Session.stats``. Call it
    from the tuner's thread.

    Args:
        profiled: returns a profile of steps of a group with the configuration in use, if there is one; otherwise a new one is
            made.
    """

    def __init__(
        self, session: Session, context: TuningContext, profiled: Callable[[int], Measured | None] = lambda group: None
    ) -> None:
        self._session = session
        self._context = context
        self._profiled = profiled

    def run(self, group: int, manifest: Manifest) -> bool:
        """Assess the training of ``group``, whose tensors are in ``manifest``. False if it ended first, or another group is
        trained.

        Raises:
            Stopped, ClosedError: training ends.
        """
        try:
            meter = self._context.meter
            main = meter.wait_until_training(ASSESSED_AFTER)
            if main is None or main[0] != group:
                return False
            measured = self._profiled(group) or self._profile(group, manifest)
            if not meter.wait_for_steps(group, ASSESSED_STEPS) or not self._await_certainty(group):
                return False
            self._assess(group, manifest, measured)
        except Exception as error:
            if is_end(error):
                raise
            log.warning("the steps were not assessed: %s", error_text(error))
        return True

    def _await_certainty(self, group: int) -> bool:
        """Wait until it is known whether a rank is slow, if one seems to be. False as for :meth:`run`."""
        from ..tuner.assessment import is_open  # here: it imports the simulator's dependencies

        for _ in range(0, MOST_MORE_STEPS, ASSESSED_STEPS):
            paced = self._session.statistics.paced(group, ASSESSED_STEPS)
            if paced is None or not is_open(paced):
                return True
            if not self._context.meter.wait_for_steps(group, ASSESSED_STEPS):
                return False
        return True

    def _profile(self, group: int, manifest: Manifest) -> Measured | None:
        try:
            return self._context.learner.profile(group, manifest)
        except NothingMeasured as error:
            log.debug("no profile of the steps: %s", error)
            return None

    def _assess(self, group: int, manifest: Manifest, measured: Measured | None) -> None:
        from ..tuner.assessment import assess, in_words  # here: it imports the simulator's dependencies

        paced = self._session.statistics.paced(group, ASSESSED_STEPS)
        if paced is None:
            return
        found = assess(paced, manifest, measured, self._context.job, self._context.settings)
        self._session.statistics.assessment = found
        for line in in_words(found, self._context.settings):
            self._context.say(line)


def start_tuning(session: Session, settings: Settings, job: JobFacts, say: Callable[[str], None]) -> None:
    """Make every rank measure its steps, and rank 0 tune. Collective; call it before the first group is registered.

    Args:
        say: prints a line for the user.

    Raises:
        ConfigError, UnsupportedError: the settings ask for a search that is not possible; raised on all ranks alike.
    """
    refusals = session.gather(_refusal(settings, session.core) if session.rank == 0 else None)
    if refusals[0] is not None:
        raise from_record(refusals[0])
    meter = _meter(session, session.tell_tuner)
    if session.rank != 0:
        session.use_tuner(meter)
        return
    from ..tuner.job import TuningJob  # here: it imports the searchers' dependencies

    context = _context(session, settings, job, meter, say)
    trials = context.trials  # what it has applied may not be agreed on yet when the next search begins
    context = replace(context, current=lambda: trials.applied or session.core.next_config)
    _start(session, context, TuningJob(context).run, partial(_tell_end, settings.tune_end), Assessor(session, context))


def _meter(session: Session, tell: Callable[[Any], None]) -> StepTimer:
    core = session.core
    meter = StepTimer(tell, is_over=lambda group: not core.without_released({group: 0}))
    session.on_register(meter.add_group)
    core.on_step = meter.on_step  # called from the engine's thread; it costs less than an observer
    return meter


def _context(
    session: Session, settings: Settings, job: JobFacts, meter: StepTimer, say: Callable[[str], None]
) -> TuningContext:
    trials = TrialRunner(session, meter.main_group, SETTLE_STEPS)
    learner = Learner(
        *(job, meter, session.observe, lambda: trials.stopped, most_seconds_per_byte(job, settings)),
        counts=lambda group: group not in session.own_groups,
    )
    core = session.core
    first = FirstSizes(job, settings, lambda: core.next_config)
    return TuningContext(
        settings,
        job,
        meter,
        trials,
        learner,
        current=lambda: core.next_config,
        say=say,
        may_freeze=core.may_freeze,
        is_static=lambda group: core.static_group == group,
        first_sizes=first.of if settings.chooses_sizes else lambda manifest, config: config,
    )


def _start(session: Session, context: TuningContext, search: Search, end: Callable[[str], None], assessor: Assessor) -> None:
    tuner = OnlineTuner(context, search, end, assessor.run)
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
    from ..tuner.job import require_possible

    try:
        require_possible(settings, core)
    except CommschedError as error:
        return to_record(error)
    return None
