"""The rows of ``python -m bench tune`` as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median, median_high
from typing import Any

from commsched import SchedulerConfig
from commsched.tuner.result import describe_config

from ..harness.results import table
from .comparison import WITHIN

Row = Mapping[str, Any]

#: Suffix of a search that is shown after another number of trials than tuning's default.
_OWN_BUDGET = "*"

_COLUMNS = {
    "searcher": "searcher",
    "reached 0": "trials to 3 %",
    "seconds 0": "s to 3 %",
    "reached 1": "trials to 2 %",
    "seconds 1": "s to 2 %",
    "after": "regret %",
    "worst": "worst %",
    "spent": "s",
    "kept": "kept %",
    "kept worst": "worst kept %",
    "kept seconds": "s with comparison",
    "reasons": "verdicts",
}

_SUMMARY_COLUMNS = {
    "searcher": "searcher",
    "workers": "workers",
    "cases": "cases within 3 %",
    "regret": "regret %",
    "worst": "worst %",
    "trials": "trials to 3 %",
    "seconds": "s to 3 %",
}

_LIVE_COLUMNS = {
    "searcher": "searcher",
    "run": "run",
    "kept": "kept",
    "regret": "regret %",
    "gain": "gain %",
    "interval": "95 %",
    "trials": "trials",
    "steps": "steps",
    "seconds": "s",
    "reason": "verdict",
}


def text(grid: Row, replayed: Sequence[Row]) -> str:
    """The measured grid, and a table of the searches over it (at least one)."""
    seeds, budget = replayed[0]["seeds"], replayed[0]["budget_trials"]
    errors = [row["model_error"] for row in replayed if "model_error" in row]
    model = [f"the simulator's predictions are typically {errors[0]:.1%} off the grid's step times"] if errors else []
    return "\n".join(
        [
            _heading(grid),
            *model,
            f"REPLAYED over measured windows, {seeds} seeds, medians: a trial draws steps from a window of its configuration, "
            f"all off by one factor as windows differ, and costs {grid['settle']} + {grid['steps']} steps.",
            "Trials and seconds of training until what the search would name stays within 3 % and 2 % of the grid's best "
            "(k/n: in so many seeds only; -: not in most);",
            f"regret: how much slower that is after {budget} trials, which take s; kept: the same for the whole of tuning, "
            "with windows of 10 steps, comparison and early end",
            *_notes(replayed),
            table([_shown(row) for row in replayed], _COLUMNS),
        ]
    )


def summary_text(replayed: Sequence[Row]) -> str:
    """A summary of each searcher over all cases with the same number of workers. ``replayed`` are the rows of all grids (at
    least one)."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in replayed:
        groups.setdefault((row["workers"], _name(row)), []).append(row)
    budget = replayed[0]["budget_trials"]
    return "\n".join(
        [
            f"ALL CASES, REPLAYED: in how many (model x rate) the median regret after {budget} trials is at most 3 %;",
            "regret: the median over cases of that; worst: of any seed in any case; trials and s to 3 %: medians over cases "
            "(-: not in most)",
            *_notes(replayed),
            table([_summed(*key, groups[key]) for key in sorted(groups, key=lambda key: key[0])], _SUMMARY_COLUMNS),
        ]
    )


def _summed(workers: int, name: str, rows: Sequence[Row]) -> dict[str, Any]:
    at_end = [_at_end(row) for row in rows]
    within = WITHIN[0]
    trials, seconds = (
        median_high(inf if (found := row["reached"][0][key]) is None else found for row in rows)
        for key in ("trials", "seconds")
    )
    return {
        "searcher": name,
        "workers": workers,
        "cases": f"{sum(each['regret'] <= within for each in at_end)}/{len(rows)}",
        "regret": f"{100 * median(each['regret'] for each in at_end):.1f}",
        "worst": f"{100 * max(each['worst_regret'] for each in at_end):.1f}",
        "trials": None if trials == inf else trials,
        "seconds": None if seconds == inf else f"{seconds:.0f}",
    }


def _at_end(row: Row) -> Row:
    """The state of a search after tuning's default number of trials. The published search has no such budget; its state is
    after its own number of trials."""
    found: Row = row["after_budget"] if row["tuning"] is not None else row["in_the_end"]
    return found


def _name(row: Row) -> str:
    return f"{row['searcher']}{_OWN_BUDGET if row['tuning'] is None else ''}"


def _notes(replayed: Sequence[Row]) -> list[str]:
    """Notes that readers need on the lines of some searchers."""
    notes = []
    if own := next((row for row in replayed if row["tuning"] is None), None):
        trials, per_trial = own["in_the_end"]["trials"], f"{own['settle']} + {own['steps']}"
        notes.append(f"{_OWN_BUDGET}: after its own {trials:.0f} trials of {per_trial} steps each, not {own['budget_trials']}")
    if modelled := next((row for row in replayed if row["beforehand_steps"]), None):
        steps = modelled["beforehand_steps"]
        notes.append(
            f"{modelled['searcher']}: its seconds begin with a profile, {steps} steps of the default configuration; "
            "the simulator's processor time is not in them"
        )
    return notes


def live_text(rows: Sequence[Row]) -> str:
    """The results of the tuner itself."""
    return "LIVE: the tuner in training jobs of its own; regret is against the grid that was measured before\n" + table(
        [_live_shown(row) for row in rows], _LIVE_COLUMNS
    )


def _heading(row: Row) -> str:
    best, incumbent = (SchedulerConfig(**row[key]) for key in ("best", "incumbent"))
    slowest = max(each["step_seconds"] for each in row["configs"])
    default = row["incumbent_seconds"] / row["best_seconds"] - 1
    return (
        f"EMULATED {row['model']}, {row['gradient_bytes'] / 1e6:.1f} MB of gradients, {row['workers']} workers, "
        f"{row['transport']}, link {row['link']}: compute {1e3 * row['compute_seconds']:.0f} ms, communication "
        f"{1e3 * row['comm_seconds']:.0f} ms, T* {1e3 * row['bound_seconds']:.0f} ms\n"
        f"grid of {len(row['configs'])}, {row['passes']} windows of {row['steps']} steps each: best {describe_config(best)}: "
        f"{1e3 * row['best_seconds']:.0f} ms; default {describe_config(incumbent)}: {1e3 * row['incumbent_seconds']:.0f} ms "
        f"({default:+.1%}); slowest {1e3 * slowest:.0f} ms; windows of one configuration differ "
        f"by {row['window_deviation']:.1%} (standard deviation) more than their steps say{_chosen(row)}"
    )


def chosen_text(grids: Sequence[Row]) -> str:
    """How near the sizes that jobs have chosen themselves come to the best of each grid. Empty if no grid has them: earlier
    versions did not measure them."""
    found = [regret_of_chosen(row) for row in grids if "chosen" in row]
    if not found:
        return ""
    return (
        f"CHOSEN by a job that sets nothing, MEASURED in the same passes: within 3 % of the best of the grid in "
        f"{sum(regret <= WITHIN[0] for regret in found)} of {len(found)} cases; {median(found):+.1%} in the median, "
        f"{max(found):+.1%} at worst"
    )


def regret_of_chosen(row: Row) -> float:
    """The relative amount by which the sizes that the job has chosen are slower than the best of the grid."""
    return float(row["chosen"]["step_seconds"] / row["best_seconds"] - 1)


def _chosen(row: Row) -> str:
    if "chosen" not in row:
        return ""
    config = SchedulerConfig(**{name: row["chosen"][name] for name in SchedulerConfig().to_record() if name in row["chosen"]})
    milliseconds = 1e3 * row["chosen"]["step_seconds"]
    return f"\nchosen by the job itself: {describe_config(config)}: {milliseconds:.0f} ms ({regret_of_chosen(row):+.1%})"


def _shown(row: Row) -> dict[str, Any]:
    shown: dict[str, Any] = {"searcher": _name(row)}
    for place, found in enumerate(row["reached"]):
        all_of_them = found["seeds"] == row["seeds"]
        count = "" if all_of_them else f" ({found['seeds']}/{row['seeds']})"
        shown[f"reached {place}"] = f"{'-' if found['trials'] is None else found['trials']}{count}"
        shown[f"seconds {place}"] = None if found["seconds"] is None else f"{found['seconds']:.0f}"
    after = _at_end(row)
    shown |= {
        "after": f"{100 * after['regret']:.1f}",
        "worst": f"{100 * after['worst_regret']:.1f}",
        "spent": f"{after['seconds']:.0f}",
    }
    if row["tuning"] is not None:
        tuning = row["tuning"]
        shown |= {
            "kept": f"{100 * tuning['regret']:.1f}",
            "kept worst": f"{100 * tuning['worst_regret']:.1f}",
            "kept seconds": f"{tuning['seconds']:.0f}",
            "reasons": ", ".join(f"{count} {reason}" for reason, count in sorted(tuning["reasons"].items())),
        }
    return shown


def _live_shown(row: Row) -> dict[str, Any]:
    verdict = row["verdict"]
    return {
        **{key: row[key] for key in ("searcher", "run")},
        **{key: verdict[key] for key in ("trials", "steps", "reason")},
        "kept": describe_config(SchedulerConfig(**verdict["kept"])),
        "regret": f"{100 * row['regret']:.1f}",
        "gain": f"{100 * verdict['gain']:.1f}",
        "interval": f"{100 * verdict['low']:.1f} to {100 * verdict['high']:.1f}",
        "seconds": f"{verdict['seconds']:.0f}",
    }
