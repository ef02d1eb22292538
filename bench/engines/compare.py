"""The measurements of ``python -m bench engines``: commsched under another engine than PyTorch, and that engine's own systems.

Each turn of a system is a job of its own, because engines start their communication only once per process. Systems take turns
on links that are made alike; each round starts with another system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from commsched import ConfigError

from ..harness.job import Job, run_job
from ..harness.links import Links, require_capped, why_not_shaped
from ..harness.measure import LayerTimes, rotated
from ..harness.results import commit, table
from ..harness.row_table import COLUMNS, heading, shown
from ..harness.rows import Header, Row, make_rows
from ..harness.scaling import Scaling
from .turn import systems_of

#: ``turns[name][i][r]`` is the result of rank ``r`` in the ``i``-th turn of a system.
Turns = dict[str, list[list[dict[str, Any]]]]


@dataclass(frozen=True)
class Comparison:
    """The options of a measurement; see ``turns.TrainOptions``. Empty ``systems`` means all systems of the engine."""

    engine: str
    systems: tuple[str, ...]
    scaling: Scaling
    links: Links
    rounds: int
    settle: int
    steps: int
    partition: str
    credit: str
    timeout_seconds: float


def measure_rows(wanted: Comparison) -> list[Row]:
    """One row for each system.

    Raises:
        ConfigError: there is no such engine or system, the engine is not installed here, or links cannot be shaped.
        JobFailed: a process failed or took too long.
    """
    known = systems_of(wanted.engine)
    names = wanted.systems or tuple(known)
    for name in names:
        if name not in known:
            raise ConfigError(f"systems: {name!r}: with {wanted.engine} there are {', '.join(known)}")
    links = wanted.links
    missing = why_not_shaped(links)
    require_capped(links, missing, [name for name in names if name != "commsched"])
    arguments = {
        **{key: getattr(wanted, key) for key in ("engine", "settle", "steps")},
        "chooses_sizes": "auto" in (wanted.partition, wanted.credit),
        "profile": wanted.scaling.profile.to_record(),
        "nominal_rates": links.rates,
        "capped": missing is not None,
    }
    settings = {"transport": "ps", "partition": wanted.partition, "credit": wanted.credit}
    job = Job(links.workers, 0, links.for_job(), settings, wanted.timeout_seconds, auto_sizes=True)
    turns: Turns = {name: [] for name in names}
    link = ""
    for turn in range(wanted.rounds):
        for name in rotated(names, turn):
            outcome = run_job(job, f"{__package__}.rank", {**arguments, "system": name})
            link = outcome.link
            links.require_as_planned(link, missing)
            turns[name].append(outcome.by_rank)
    assert links.rates is not None
    header = Header(
        model=wanted.scaling.real.model,
        workers=links.workers,
        servers=0,
        bandwidth_bps=8 * min(links.rates),
        link=link,
        emulated=True,
        stands_for=wanted.scaling.stands_for(min(links.rates)),
        lane="tcp",
        commit=commit(),
    )
    return rows_of(header, wanted.engine, LayerTimes.of(wanted.scaling.profile), turns)


def rows_of(header: Header, engine: str, layers: LayerTimes, turns: Turns) -> list[Row]:
    """The rows of all systems."""
    by_rank = [_measured(layers, turns, rank) for rank in range(header.workers)]
    rows = make_rows(header, by_rank)
    asynchronous = {name for name, found in turns.items() if found[0][0]["max_difference"] is None}
    own = [row["step_seconds"]["median"] for row in rows if row["system"] not in {"commsched", *asynchronous}]
    for row in rows:
        row["engine"] = engine
        row["speedup_vs_own"] = min(own) / row["step_seconds"]["median"] if own else None
        if row["system"] in asynchronous:
            row["correct"] = row["speedup_vs_own"] = None
            row["config"] += ", asynchronous: other weights"
    return rows


def text(rows: Sequence[Row]) -> str:
    """The conditions and a table, in the format of ``bench train``."""
    hidden = {"speedup_vs_ddp", "speedup_vs_ddp_tuned", "possible_speedup_vs_ddp"}
    columns = {key: heading for key, heading in COLUMNS.items() if key not in hidden}
    columns["speedup_vs_own"] = f"vs {rows[0]['engine']}'s best"
    return f"{heading(rows)}\n{table([shown(row) for row in rows], columns)}"


def _measured(layers: LayerTimes, turns: Turns, rank: int) -> dict[str, Any]:
    """The measurements in the format of ``turns.rank.rank_main``. The network's rates are from the best turn, because other
    activity only slows the network down."""
    networks = [by_rank[rank]["network"] for found in turns.values() for by_rank in found]
    network = max(networks, key=lambda each: min(each["worker_rates"]))
    systems = {name: _system([by_rank[rank] for by_rank in found]) for name, found in turns.items()}
    return {"network": network, "layers": [asdict(layers)], "systems": systems}


def _system(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seconds = [second for turn in found for second in turn["seconds"]]
    sizes = list(dict.fromkeys(tuple(turn["sizes"] or ()) for turn in found))  # each turn is a job, which chooses its own
    words = " and ".join(f"partition {each[0] / 1e6:.3g} MB, credit {each[1] / 1e6:.3g} MB" for each in sizes if each)
    partition, credit = sizes[0] if len(sizes) == 1 and sizes[0] else (None, None)
    return {
        "transport": "ps" if words else "its own",
        "words": words or "its default",
        "message_seconds": None,
        "partition_bytes": partition,
        "credit_bytes": credit,
        "fusion_bytes": None,
        "seconds": seconds,
        "cpu_seconds": sum(turn["cpu_seconds"] for turn in found) / len(found) * len(seconds),
        "max_difference": max(inf if turn["max_difference"] is None else turn["max_difference"] for turn in found),
        "timeline": [],
    }
