"""The measured part: every configuration of a grid, and the sizes that the job itself chooses, in one job, as a row. Also
converts a row to a surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import median
from typing import Any

from commsched import ConfigError, SchedulerConfig
from commsched.settings import Settings
from commsched.simulator.scenario import bytes_factor

from ..harness.job import Job, run_job
from ..harness.links import why_not_shaped
from ..harness.measure import TOLERATED_DIFFERENCE, LayerTimes, slowest
from ..harness.processes import JobFailed
from ..harness.progress import relayed_lines
from ..harness.results import commit
from ..harness.rows import bound_of_ranks
from ..harness.system import Carrier
from .case import Case, Surface

Row = dict[str, Any]


def measure(case: Case, *, passes: int, settle: int, steps: int, timeout_seconds: float) -> Row:
    """Train with every configuration of the case's grid, and with the sizes that the job itself chooses, ``passes`` times (at
    least two).

    Raises:
        JobFailed: a process failed or took too long, links could not be shaped, or weights are not those of plain averaging.
    """
    missing = why_not_shaped(case.links)
    carrier = Carrier(case.transport)
    job = Job(
        case.workers,
        0,
        case.bandwidth,
        {"transport": case.transport},
        timeout_seconds,
        mpi=case.transport == "mpi",
        auto_sizes=True,
    )
    with relayed_lines() as progress:
        outcome = run_job(
            job,
            f"{__package__}.rank",
            {
                "workload": {"kind": "emulated", "profile": case.scaling.profile.to_record()},
                "incumbent": case.space.incumbent.to_record(),
                "configs": [config.to_record() for config in case.grid],
                "orders": case.orders(passes),
                "settle": settle,
                "steps": steps,
                "transport": case.transport,
                "order": carrier.order,
                "bytes_scale": case.scaling.bytes_scale,
                "nominal_rates": case.links.rates,
                "capped": missing is not None,
                "progress": progress,
            },
        )
    case.links.require_as_planned(outcome.link, missing)
    difference = max(rank["max_difference"] for rank in outcome.by_rank)
    if not difference <= TOLERATED_DIFFERENCE:
        raise JobFailed(f"{case}: weights differ from plain averaging by {difference:.2g} of the change that training made")
    if outcome.by_rank[0]["profiled"] is None:
        raise JobFailed(f"{case}: the tuner's profiler saw no whole step")
    return _row(case, outcome.link, settle, outcome.by_rank, difference)


def _row(case: Case, link: str, settle: int, by_rank: Sequence[Mapping[str, Any]], difference: float) -> Row:
    measured = by_rank[0]
    layers = [LayerTimes(**each) for each in measured["layers"]]
    rate = min(measured["network"]["worker_rates"])
    per_byte = bytes_factor(case.workers) / rate
    bound, slowest_layers = bound_of_ranks(layers, [(per_byte, 0.0)])
    windows = [
        [list(slowest([rank["passes"][number][place] for rank in by_rank])) for number in range(len(measured["passes"]))]
        for place in range(len(case.grid) + 1)
    ]
    of_chosen = windows.pop()
    surface = Surface(dict(zip(case.grid, windows, strict=True)))
    return {
        "kind": "grid",
        "model": case.model,
        "workers": case.workers,
        "bandwidth_bps": 8 * case.rate_bytes_per_second,
        "link": link,
        "emulated": True,
        "transport": case.transport,
        "lane": Settings.load({"transport": case.transport}, {}).lane if case.transport == "ps" else None,
        "gradient_bytes": case.scaling.profile.nbytes,
        "link_bytes_per_second": rate,
        "per_message_seconds": measured["message_seconds"],
        "compute_seconds": sum(slowest_layers.forward_seconds) + sum(slowest_layers.backward_seconds),
        "comm_seconds": per_byte * sum(slowest_layers.nbytes),
        "bound_seconds": bound,
        "settle": settle,
        "steps": len(windows[0][0]),
        "passes": len(windows[0]),
        "case": {name: getattr(case, name) for name in Case.__dataclass_fields__},
        "incumbent": case.space.incumbent.to_record(),
        "chosen": {**measured["chosen"], "step_seconds": median(chain.from_iterable(of_chosen)), "windows": of_chosen},
        **_found(surface, case.space.incumbent),
        "profiled": measured["profiled"],
        "layers": asdict(slowest_layers),
        "stands_for": case.scaling.stands_for(case.rate_bytes_per_second),
        "max_difference": difference,
        "commit": commit(),
    }


def _found(surface: Surface, incumbent: SchedulerConfig) -> Row:
    """The figures that are computed from the steps."""
    return {
        "incumbent_seconds": surface.seconds[incumbent],
        "best": surface.best.to_record(),
        "best_seconds": surface.seconds[surface.best],
        "window_deviation": surface.window_deviation,
        "configs": [
            {**config.to_record(), "step_seconds": surface.seconds[config], "windows": surface.passes[config]}
            for config in surface.passes
        ],
    }


def read_again(row: Row) -> Row:
    """``row`` of an earlier file, with all figures recomputed from its steps by the current program.

    Raises:
        ConfigError: the row is not of a grid, or cannot be replayed.
    """
    case = case_of(row)
    try:
        return {**row, **_found(surface_of(row), SchedulerConfig(**row["incumbent"]))}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{case}: {type(error).__name__}: {error}") from error


def surface_of(row: Mapping[str, Any]) -> Surface:
    """The surface of the steps in ``row``."""
    names = SchedulerConfig().to_record()
    return Surface(
        {SchedulerConfig(**{name: each[name] for name in names if name in each}): each["windows"] for each in row["configs"]},
    )


def case_of(row: Mapping[str, Any]) -> Case:
    """The case in which ``row`` was measured.

    Raises:
        ConfigError: the row is not of a grid.
    """
    try:
        return Case(**row["case"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"not a row of a grid that bench tune measured: {type(error).__name__}: {error}") from error
