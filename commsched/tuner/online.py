"""Choosing a configuration while training runs: rank 0's thread, which decides when to search."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import CommschedError, error_text
from ..core.manifest import Manifest
from ..core.scheduler import SchedulerConfig
from .learn import TuningContext, is_end
from .result import Verdict, milliseconds
from .stats import DriftDetector

if TYPE_CHECKING:
    from .auto import Chosen  # which needs the simulator's dependencies

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


#: A search for a better configuration for the tensors of a group: ``TuningJob.run`` by trials, or ``AutoChoice.run``. The last
#: argument says whether step times have changed since the last search. None means that there is nothing to choose.
Search = Callable[[int, Manifest, bool], "Verdict | Chosen | None"]

#: Assesses the training of the tensors of a group, once no search is under way (``Assessor.run``). False if that was not
#: possible yet.
Assess = Callable[[int, Manifest], bool]


def no_search(group: int, manifest: Manifest, again: bool) -> None:
    """A :data:`Search` with nothing to choose."""


class OnlineTuner:
    """Rank 0's tuner (``session.events.Tuner``). Its thread waits until training is under way, searches, and then watches
    whether step times change and whether other tensors are trained. Errors in the thread do not stop training.

    Args:
        end: is called with the reason when no further search follows and there is no result.
        assess: is called until it returns true, whenever a search is over.
        make_drift: makes the detector that decides when to tune again, given the steps that must pass first.
    """

    def __init__(
        self,
        context: TuningContext,
        search: Search,
        end: Callable[[str], None] = lambda why: None,
        assess: Assess = lambda group, manifest: True,
        make_drift: Callable[[int], DriftDetector] = lambda rest_steps: DriftDetector(rest_steps=rest_steps),
    ) -> None:
        self._meter = context.meter
        self._trials = context.trials
        self._learner = context.learner
        self._say = context.say
        self._first_sizes = context.first_sizes
        self._search = search
        self._end = end
        self._assess = assess
        self._is_assessed = False
        self._make_drift = make_drift
        self._rest_steps = REST_STEPS
        self._before: SchedulerConfig | None = None  # in use before any search
        self._kept: dict[int, SchedulerConfig] = {}  # by group: the result of its last search
        self._drifted: int | None = None  # a group whose steps have become slower or faster since its search
        self._left_alone: set[int] = set()  # groups with nothing to choose, or that come and go
        self._cut_off: Counter[int] = Counter()  # by group: searches that another group cut off
        self.is_settled = search is no_search  # whether no search is under way or about to begin
        self._thread = threading.Thread(target=self._run, name="commsched-tuner", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # --- session.events.Tuner ---

    def on_switch(self, window: Mapping[str, Any], steps: Mapping[int, int]) -> None:
        """All ranks will use the configuration proposed with ``window`` from step ``steps[group]`` of each group on. No rank
        has begun these steps."""
        self._meter.on_switch(window, steps)

    def on_message(self, rank: int, value: Any) -> None:
        """``rank`` passed ``value`` to ``Session.tell_tuner``."""
        self._trials.on_message(rank, value)

    def on_leave(self, rank: int) -> None:
        """Another rank, ``rank``, has begun its last step."""
        self._stop(f"rank {rank} has left")

    def on_failure(self, error: CommschedError) -> None:
        """Stop, because the job failed."""
        self._stop(str(error))

    def close(self, wait: bool) -> None:
        """The session closes: propose nothing more. Called from the thread that closes the session. With ``wait``, the search
        may take a few seconds to finish its work in progress."""
        self._stop("the session closes")
        if wait:
            self._thread.join(_END_SECONDS)

    def _stop(self, why: str) -> None:
        self._trials.stop(why)
        self._meter.close()
        self._learner.stop()

    # --- the thread ---

    def _run(self) -> None:
        try:
            while (main := self._meter.wait_until_training(WARM_UP_STEPS)) is not None:
                group, manifest = main
                if group not in self._left_alone and (group not in self._kept or group == self._drifted):
                    self.is_settled = self._search is no_search
                    verdict = self._search(group, manifest, group == self._drifted)
                    if not self._goes_on(group, verdict):
                        return
                    if verdict is not None and not verdict.finished:
                        continue  # with the group that is trained now
                self._drifted = None
                self.is_settled = True
                self._is_assessed = self._is_assessed or self._assess(group, manifest)
                if not self._watch(group):
                    return
        except Exception as error:
            self._give_up(error)
        finally:
            self.is_settled = True

    def _goes_on(self, group: int, verdict: Verdict | Chosen | None) -> bool:
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
            self._say(f"steps take {now} ms now, and took {before} ms before: choosing again")
        else:
            self._on_other_group()
        return True

    def _on_other_group(self) -> None:
        """Apply the main group's own result, or else the configuration from before any search, with the sizes that its tensors
        begin with: the result of one group may not be good for another. Does nothing if nothing was ever chosen."""
        if self._before is None:
            return
        main, config = self._meter.main_group(), self._before
        if main is not None:
            config = self._kept.get(main) or self._first_sizes(self._meter.manifest_of(main), config)
            self._say("other tensors are trained now")
        self._trials.apply(config)

    def _give_up(self, error: Exception) -> None:
        """Report why the tuner ended. The search has already applied the configuration from before it; all ranks use it from a
        later step on."""
        if self._trials.stopped is not None or is_end(error):
            log.debug("the tuner ended with the session: %s", error)
            return
        if isinstance(error, CommschedError):
            self._say(f"tuning: not possible: {error}")
        else:
            log.error("the tuner failed; training goes on as before", exc_info=error)
        self._end(error_text(error))
