"""Searchers side by side over one measured grid, as rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, median_high
from typing import Any

from commsched import SchedulerConfig
from commsched.settings import DEFAULT_BUDGET
from commsched.simulator.profile import Profile
from commsched.tuner.initial_guesses import seeds
from commsched.tuner.learn import PROFILE_TAKES
from commsched.tuner.model import Model
from commsched.tuner.profiler import LinkEstimate
from commsched.tuner.result import Verdict
from commsched.tuner.searchers import Searcher, make_searcher

from ..harness.measure import median_absolute_error
from .case import Case, Surface
from .grid import Row, case_of, surface_of
from .replay import PAPER_POINTS, PAPER_SETTLE, PAPER_STEPS, Cost, PaperSearch, Point, reached, search, tune


@dataclass(frozen=True)
class Prediction:
    """The seeds and the model for a searcher, from the measurements of the tuner's profiler in the grid's job.

    ``model`` caches its simulations and is not thread-safe. Calibration makes another model, so all searchers start with the
    same one.
    """

    seeds: list[SchedulerConfig]
    model: Model

    @classmethod
    def of(cls, row: Row) -> Prediction:
        """Make the prediction as the tuner does online (``commsched.tuner.job``). ``row`` is the row of a grid, see
        ``grid.measure``."""
        profiled, incumbent = row["profiled"], SchedulerConfig(**row["incumbent"])
        profile, times = Profile.from_record(profiled["profile"]), profiled["link"]
        link = LinkEstimate(times["seconds_per_byte"], times["partition_seconds"], times.get("latency_seconds", 0.0))
        ordered = row["transport"] != "ps"
        model = Model(profile, link, row["workers"], ordered=ordered, anchor_bytes=incumbent.partition_bytes)
        likely = seeds(profile, link, row["workers"], ordered=ordered, policy=incumbent.policy)
        return cls(likely, model.calibrate([(incumbent, profiled["step_seconds"])]))

    def error(self, surface: Surface) -> float:
        """The median absolute relative error over the grid."""
        return median_absolute_error((seconds, self.model.predict(config)) for config, seconds in surface.seconds.items())


#: Suffix of a searcher's name: the searcher gets seeds and predictions of the simulator, computed from measurements.
MODEL = "+model"
#: Name of the published search.
PAPER = "paper"
#: Number of trials for which searches are followed.
TRIALS = 24
#: The default budget of online tuning, in trials.
BUDGET_TRIALS = DEFAULT_BUDGET.trials or TRIALS
#: Steps of a profile online: its own steps, the step under way when it begins, and the beginning of the step after it.
_BEFOREHAND = PROFILE_TAKES
#: Relative regrets that count as good enough.
WITHIN = (0.03, 0.02)


@dataclass(frozen=True)
class Searching:
    """The searches to replay. ``searchers`` are names, with or without :data:`MODEL`. ``seeds`` is the number of replays of
    each. ``paper`` adds the published search."""

    searchers: tuple[str, ...]
    seeds: int
    paper: bool


def replayed_rows(row: Row, searching: Searching) -> list[Row]:
    """One row for each searcher.

    Args:
        row: the row of the grid, see ``grid.measure``.

    Raises:
        ConfigError: a searcher needs a package that is not installed.
    """
    case, surface = case_of(row), surface_of(row)
    prediction = Prediction.of(row) if any(name.endswith(MODEL) for name in searching.searchers) else None
    rows = [_replayed(row, case, surface, name, searching.seeds, prediction) for name in searching.searchers]
    return [*rows, _paper(row, case, surface, searching.seeds)] if searching.paper else rows


def _replayed(row: Row, case: Case, surface: Surface, name: str, seeds: int, prediction: Prediction | None) -> Row:
    with_model = name.endswith(MODEL) and prediction is not None
    cost = Cost(row["settle"], row["steps"], _BEFOREHAND if with_model else 0)
    incumbent = case.space.incumbent

    def make(seed: int) -> Searcher:
        if name.endswith(MODEL) and prediction is not None:
            base = name.removesuffix(MODEL)
            return make_searcher(base, case.space, seeds=prediction.seeds, model=prediction.model, random_seed=seed)
        return make_searcher(name, case.space, random_seed=seed)

    curves = [search(surface, make(seed), incumbent, TRIALS, cost, seed) for seed in range(seeds)]
    verdicts = [tune(surface, make(seed), incumbent, DEFAULT_BUDGET, cost, seed) for seed in range(seeds)]
    beforehand_seconds = cost.beforehand_seconds(surface, incumbent)
    model = {"model_error": prediction.error(surface)} if name.endswith(MODEL) and prediction is not None else {}
    return {**_row(row, name, cost, curves), **model, "tuning": _tuning(surface, verdicts, beforehand_seconds)}


def _paper(row: Row, case: Case, surface: Surface, seeds: int) -> Row:
    cost = Cost(PAPER_SETTLE, PAPER_STEPS)
    incumbent = case.space.incumbent
    curves = [search(surface, PaperSearch(case.space, seed), incumbent, PAPER_POINTS, cost, seed) for seed in range(seeds)]
    return {**_row(row, PAPER, cost, curves), "tuning": None}


def _row(row: Row, name: str, cost: Cost, curves: Sequence[Sequence[Point]]) -> Row:
    after = [curve[min(BUDGET_TRIALS, len(curve)) - 1] for curve in curves]
    return {
        "kind": "replayed",
        "title": str(case_of(row)),
        **{key: row[key] for key in ("model", "workers", "bandwidth_bps", "link", "emulated", "transport")},
        "searcher": name,
        "seeds": len(curves),
        "settle": cost.settle,
        "steps": cost.steps,
        "beforehand_steps": cost.beforehand,
        "budget_trials": BUDGET_TRIALS,
        "reached": [_reached(curves, within) for within in WITHIN],
        "after_budget": {
            "regret": median(point.regret for point in after),
            "worst_regret": max(point.regret for point in after),
            "seconds": median(point.seconds for point in after),
        },
        "in_the_end": {
            "trials": median(len(curve) for curve in curves),
            "seconds": median(curve[-1].seconds for curve in curves),
            "regret": median(curve[-1].regret for curve in curves),
            "worst_regret": max(curve[-1].regret for curve in curves),
        },
        "curves": [[_record(point) for point in curve] for curve in curves],
    }


def _reached(curves: Sequence[Sequence[Point]], within: float) -> dict[str, Any]:
    """Medians over seeds. A search that did not reach ``within`` counts as infinite; None stands for an infinite median."""
    found = [reached(curve, within) for curve in curves]
    trials = median_high([inf if point is None else point.trial for point in found])
    seconds = median_high([inf if point is None else point.seconds for point in found])
    return {
        "within": within,
        "seeds": sum(point is not None for point in found),
        "trials": None if trials == inf else trials,
        "seconds": None if seconds == inf else seconds,
    }


def _tuning(surface: Surface, verdicts: Sequence[Verdict], beforehand_seconds: float) -> dict[str, Any]:
    """Results of complete tuning runs, including the comparison: the configurations that they keep. The seconds are training
    time, including the steps before the first trial."""
    regrets = [surface.regret(verdict.kept) for verdict in verdicts]
    return {
        "regret": median(regrets),
        "worst_regret": max(regrets),
        "trials": median(verdict.trials for verdict in verdicts),
        "steps": median(verdict.steps for verdict in verdicts),
        "seconds": beforehand_seconds + median(verdict.seconds for verdict in verdicts),
        "reasons": dict(Counter(verdict.reason for verdict in verdicts)),
    }


def _record(point: Point) -> dict[str, Any]:
    return {
        "trial": point.trial,
        "seconds": point.seconds,
        "partition_bytes": point.named.partition_bytes,
        "credit_bytes": point.named.credit_bytes,
        "regret": point.regret,
    }
