"""The search for a better configuration, from the first trial to the final comparison, with any function that measures.

The configuration in use (the incumbent) is measured first, then the configurations that a searcher asks for. The best of them
is then compared with the incumbent in additional windows. It is kept only if it is faster beyond doubt (see stats.py). So
tuning costs its trials, but does not leave training slower than before.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from ..core.scheduler import SchedulerConfig
from ..settings import Budget
from .journal import Journal, Phase, Trial
from .result import Reason, Verdict, describe_config, milliseconds
from .searchers import Candidate, Searcher
from .stats import MAX_PAIRS, MIN_PAIRS, STATED_PAIRS, PairedComparison, compare
from .trials import Measure, Stopped, TrialFailed, Window

#: Number of consecutive failures that tuning tolerates; one more ends it.
BORNE_FAILURES = 3

#: This many consecutive candidates with an expected gain below the resolution of a comparison end the search.
POOR_CANDIDATES = 2

#: Undisturbed steps per window.
MIN_STEPS = 10

#: Windows become longer if the relative standard error of the first window's median is above this, by at most this factor.
WANTED_ERROR = 0.02
LONGER_AT_MOST = 4

#: A budget of steps or seconds must have room for this many windows, so that longer windows do not use it up in a few trials.
MIN_WINDOWS = 28


class SearchRun:
    """One search. Run it once, in a thread that may block.

    Args:
        incumbent: the configuration in use.
        measure: see ``trials.Measure``.
        budget: limits of trials, steps and seconds. Failed trials and the comparison do not count as trials. Steps and seconds
            count everything; a part of the comparison may exceed them if its windows took longer than those before.
        apply: makes all ranks use a configuration from now on; may raise Stopped. Called once, with the configuration that is
            kept.
        say: writes a line to the log.
        says_verdict: False if somebody else reads it in the journal, and says it.
        also: configurations to try right after the incumbent, before those of the searcher.
        journal: the searcher receives its windows, which are not measured again; failed trials may be repeated. If the journal
            holds the verdict of a finished search, that verdict is returned and nothing is measured.
        settle_steps: steps that ``measure`` leaves out at the beginning of a window; the budget counts them.
        clock: returns seconds.
    """

    def __init__(
        self,
        incumbent: SchedulerConfig,
        searcher: Searcher,
        measure: Measure,
        budget: Budget,
        *,
        apply: Callable[[SchedulerConfig], None],
        say: Callable[[str], None],
        says_verdict: bool = True,
        also: Sequence[SchedulerConfig] = (),
        journal: Journal | None = None,
        settle_steps: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incumbent = incumbent
        self._searcher = searcher
        self._measure = measure
        self._budget = budget
        self._apply = apply
        self._say = say
        self._says_verdict = says_verdict
        self._also = list(dict.fromkeys(also))
        self._journal = journal
        self._steps = MIN_STEPS
        self._settle_steps = settle_steps
        self._clock = clock
        self._trials = 0  # of the search
        self._tried: list[SchedulerConfig] = []  # configurations with a window, in order
        self._windows = 0
        self._steps_spent = 0
        self._seconds_spent = 0.0
        self._failures = 0  # in a row
        self._last = 0.0  # when the previous trial ended
        self._errors: list[float] = []  # of windows, relative
        self._incumbent_seconds = 0.0  # per step

    def run(self) -> Verdict:
        """Search, compare, and apply the configuration that is kept. The verdict is "unfinished" if training ends first.

        Raises:
            Exception: an error of ``measure``, the searcher or the journal; the incumbent is applied first.
        """
        self._last = self._clock()
        try:
            verdict = self._recorded() or self._find()
        except BaseException:
            with suppress(Stopped):
                self._apply(self._incumbent)
            raise
        if verdict.reason != "unfinished":
            with suppress(Stopped):
                self._apply(verdict.kept)
        if self._says_verdict:
            self._say(verdict.sentence())
        return verdict

    def _recorded(self) -> Verdict | None:
        """The verdict in the journal, if its search has finished; otherwise None."""
        if self._journal is None or self._journal.result is None:
            return None
        self._say(f"tuning: the search in {self._journal.path} is finished; remove that file to search anew")
        return self._journal.result

    def _find(self) -> Verdict:
        try:
            verdict = self._decide()
        except Stopped:
            verdict = self._verdict("unfinished")
        if self._journal is not None:
            self._journal.end(verdict)
        return verdict

    def _decide(self) -> Verdict:
        try:
            baseline = self._recall() or self._measure_until_good(self._incumbent, "search")
            self._incumbent_seconds = baseline.seconds
            self._choose_steps(baseline)
            failed = self._search()
            if failed and not self._others:
                return self._verdict("failed")
            winner = self._searcher.best() or self._incumbent
            if winner == self._incumbent:
                return self._verdict("no gain")
            pairs = int(min(max(self._windows_left() / 2 - STATED_PAIRS, MIN_PAIRS), MAX_PAIRS))
            compared = compare(lambda: self._compared(self._incumbent), lambda: self._compared(winner), pairs)
            return self._verdict("kept" if compared.better else "not confirmed", winner, compared)
        except TrialFailed:  # too many in a row
            return self._verdict("failed")

    # --- the search ---

    def _recall(self) -> Window | None:
        """Pass the journal's windows to the searcher. Returns the incumbent's window, or None if it is not in the journal."""
        baseline = None
        for trial in self._journal.trials if self._journal is not None else ():
            self._count(trial)
            if trial.phase == "search" and trial.window is not None:
                self._searcher.tell(trial.config, trial.window)
                if trial.config == self._incumbent:
                    baseline = trial.window
        if self._trials:
            self._say(f"tuning: continues after {self._trials} trials")
        return baseline

    def _search(self) -> bool:
        """Try configurations while the budget allows it. Returns whether a trial has failed."""
        if not self._others and not self._may_try():
            steps = (2 + 2 * (MIN_PAIRS + STATED_PAIRS)) * self._steps_per_window
            self._say(f"tuning: the budget is too small; to try anything and confirm it takes 2 trials and {steps} steps")
        poor, failed = 0, False
        while self._may_try():
            candidate = self._next()
            if candidate is None:
                break
            least = statistics.median(self._errors) / math.sqrt(MIN_PAIRS)  # about the least gain that a comparison can detect
            poor = poor + 1 if candidate.expected_gain is not None and candidate.expected_gain < least else 0
            if poor == POOR_CANDIDATES:
                self._say(f"tuning: stopped early, no candidate promises more than the {least:.1%} that noise hides")
                break
            failed |= self._try(candidate.config, "search") is None
        return failed

    def _next(self) -> Candidate | None:
        while self._also:
            config = self._also.pop(0)
            if config != self._incumbent and config not in self._tried:
                return Candidate(config)
        return self._searcher.ask()

    def _compared(self, config: SchedulerConfig) -> float:
        return self._measure_until_good(config, "compare").seconds

    def _measure_until_good(self, config: SchedulerConfig, phase: Phase) -> Window:
        while True:
            window = self._try(config, phase)
            if window is not None:
                return window

    def _try(self, config: SchedulerConfig, phase: Phase) -> Window | None:
        """Measure one window of ``config``. Returns None if the trial failed; raises TrialFailed after too many failures in a
        row."""
        window = why = None
        try:
            measured = self._measure(config, self._steps)
            why = measured.defect()
            window = measured if why is None else None
        except TrialFailed as error:
            why = str(error)
        before, self._last = self._last, self._clock()
        counted = self._steps if window is None else window.steps + window.rejected
        trial = Trial(phase, config, window, self._last - before, self._settle_steps + counted, why)
        if self._journal is not None:
            self._journal.add(trial)
        self._count(trial)
        if phase == "search":
            self._searcher.tell(config, window)
        if self._journal is None and (phase == "search" or window is None):  # otherwise the journal has it
            found = f"failed, {why}"
            if window is not None:
                found = f"{milliseconds(window.seconds)} +- {milliseconds(window.error_seconds, like=window.seconds)} ms"
            what = f"trial {self._trials - 1}" if phase == "search" else "comparison"  # as in the journal: 0 is the incumbent's
            self._say(f"tuning: {what}: {describe_config(config, self._incumbent)}: {found}")
        self._failures = self._failures + 1 if window is None else 0
        if self._failures > BORNE_FAILURES:
            raise TrialFailed(f"{self._failures} trials in a row failed; the last: {why}")
        return window

    # --- the budget ---

    def _count(self, trial: Trial) -> None:
        self._trials += trial.phase == "search"
        self._steps_spent += trial.spent_steps
        self._seconds_spent += trial.took_seconds
        self._windows += 1
        if trial.window is not None:
            if trial.phase == "search":
                self._tried.append(trial.config)
            self._errors.append(trial.window.error_seconds / trial.window.seconds)

    @property
    def _others(self) -> int:
        return sum(config != self._incumbent for config in self._tried)

    @property
    def _steps_per_window(self) -> int:
        return self._settle_steps + self._steps

    def _windows_left(self) -> float:
        left = math.inf
        if self._budget.steps is not None:
            left = (self._budget.steps - self._steps_spent) / self._steps_per_window
        if self._budget.seconds is not None and self._seconds_spent > 0:
            seconds_per_window = self._seconds_spent / self._steps_spent * self._steps_per_window
            left = min(left, (self._budget.seconds - self._seconds_spent) / seconds_per_window)
        return left

    def _may_try(self) -> bool:
        """Whether the budget has room for one more window of the search. A third of all windows is kept for the comparison."""
        left = self._windows_left()
        pairs = min(max((self._windows + left) / 6, MIN_PAIRS + STATED_PAIRS), MAX_PAIRS + STATED_PAIRS)
        return left >= 1 + 2 * pairs and (self._budget.trials is None or len(self._tried) < self._budget.trials)

    def _choose_steps(self, baseline: Window) -> None:
        wanted = (baseline.error_seconds / baseline.seconds / WANTED_ERROR) ** 2
        longer = min(wanted, LONGER_AT_MOST, self._windows_left() / MIN_WINDOWS)
        self._steps = math.ceil(self._steps * max(longer, 1))

    def _verdict(
        self, reason: Reason, winner: SchedulerConfig | None = None, compared: PairedComparison | None = None
    ) -> Verdict:
        winner = winner or self._incumbent
        seconds = self._incumbent_seconds
        measured = {"incumbent_seconds": seconds, "winner_seconds": seconds} if compared is None else asdict(compared)
        measured.pop("better", None)
        return Verdict(
            reason,
            kept=winner if reason == "kept" else self._incumbent,
            incumbent=self._incumbent,
            winner=winner,
            trials=self._trials,
            others=self._others,
            steps=self._steps_spent,
            seconds=self._seconds_spent,
            **measured,
        )
