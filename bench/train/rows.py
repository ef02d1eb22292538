"""The rows of ``python -m bench train``, from what the ranks measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut

from ..arguments import FLOAT32_BYTES
from ..layers import LayerTimes
from ..lower_bound import lower_bound, partitioned_bound, wfbp
from ..measure import TOLERATED_DIFFERENCE, median_interval, slowest
from ..nic_load import least_seconds_per_byte, seconds_per_byte
from .network import Network

Row = dict[str, Any]


@dataclass(frozen=True)
class Header:
    """What is the same in all rows of one run and was known before it.

    ``bandwidth_bps`` is the slowest link's, ``lane`` what carries the parameter server's bytes, if there is one, and
    ``commit`` that of the program.
    """

    model: str
    workers: int
    servers: int
    bandwidth_bps: float | None
    link: str
    emulated: bool
    stands_for: dict[str, Any] | None
    lane: str | None = None
    commit: str | None = None


def make_rows(header: Header, by_rank: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each system; ``by_rank`` is what ``rank.rank_main`` returned on each rank."""
    network = Network(**by_rank[0]["network"])
    layers = [LayerTimes(**each) for each in by_rank[0]["layers"]]
    rows = [_row(header, network, layers, name, [rank["systems"][name] for rank in by_rank]) for name in by_rank[0]["systems"]]
    medians = {row["system"]: row["step_seconds"]["median"] for row in rows}
    for row in rows:
        step_seconds = medians[row["system"]]
        for key, peer, seconds in (
            ("speedup_vs_ddp", "ddp", step_seconds),
            ("speedup_vs_ddp_tuned", "ddp-tuned", step_seconds),
            ("possible_speedup_vs_ddp", "ddp", row["bound_seconds"]),
        ):
            row[key] = medians[peer] / seconds if peer in medians else None
    return rows


def wrong(rows: Sequence[Row]) -> list[str]:
    """A sentence for each system whose weights are not those of plain averaging, and were to be: of one that trains
    asynchronously it is not known (None)."""
    return [_mistake(row) for row in rows if not _is_correct(row)]


def _is_correct(row: Row) -> bool:
    if "correct" in row:
        return row["correct"] is not False
    return bool(row["max_difference"] <= TOLERATED_DIFFERENCE)  # a row that a sweep kept from before there was the key


def _mistake(row: Row) -> str:
    if row["max_difference"] is None:
        return f"{row['system']} is wrong: its weights are not finite, or there is nothing that they should have learnt"
    return (
        f"{row['system']} is wrong: from plain averaging its weights differ by {row['max_difference']:.2g} of what they were "
        "trained"
    )


def disturbed(rows: Sequence[Row]) -> list[str]:
    """A sentence for each system that was faster than any can be: what the bound is from was measured badly."""
    return [
        f"{row['system']} was faster than T*, so layers or links were disturbed while they were measured alone: measure again"
        for row in rows
        if row["step_seconds"]["high"] < row["bound_seconds"]
        and row.get("correct", True) is not None  # it is no bound of asynchronous training
    ]


def _row(
    header: Header, network: Network, layers_by_rank: Sequence[LayerTimes], name: str, by_rank: Sequence[Mapping[str, Any]]
) -> Row:
    system = by_rank[0]
    # Collectives run among the workers alone, servers or not.
    server_rates = network.server_rates if system["transport"] == "ps" else []
    per_byte = seconds_per_byte(network.worker_rates, server_rates)
    bound, layers = _bound(layers_by_rank, least_seconds_per_byte(network.worker_rates, server_rates))
    times = layers.forward_seconds, layers.backward_seconds
    samples = list(slowest([rank["seconds"] for rank in by_rank]))
    step_seconds = median_interval(samples)
    compute, comm = sum(map(sum, times)), per_byte * sum(layers.nbytes)
    lane = header.lane if system["transport"] == "ps" else None
    cpu = sum(rank["cpu_seconds"] / len(rank["seconds"]) for rank in by_rank) / len(by_rank)
    difference = max(rank["max_difference"] for rank in by_rank)
    return {
        "system": name,
        "model": header.model,
        "workers": header.workers,
        "servers": header.servers,
        "bandwidth_bps": header.bandwidth_bps,
        "link": header.link,
        "emulated": header.emulated,
        "transport": system["transport"],
        "lane": lane,
        "config": system["words"] if lane is None else f"{system['words']}, {lane} lane",
        "partition_bytes": system["partition_bytes"],
        "credit_bytes": system["credit_bytes"],
        "gradient_bytes": sum(layers.nbytes),
        "link_bytes_per_second": min(network.worker_rates),
        "per_message_seconds": system["message_seconds"],
        "compute_seconds": compute,
        "comm_seconds": comm,
        "rho": comm / compute,
        "step_seconds": step_seconds,
        "step_samples": samples,
        "bound_seconds": bound,
        "bound_overhead_seconds": _bound_with_overhead(layers, per_byte, system),
        "fifo_bound_seconds": wfbp(*times, [per_byte * size for size in layers.nbytes]),
        "efficiency": bound / step_seconds["median"],
        "speedup_vs_ddp": None,
        "speedup_vs_ddp_tuned": None,
        "possible_speedup_vs_ddp": None,
        "exposed_seconds": step_seconds["median"] - compute,
        "cpu_seconds_per_step": cpu,
        "max_difference": difference if isfinite(difference) else None,
        "correct": difference <= TOLERATED_DIFFERENCE,
        "stands_for": _stands_for(header, cpu / step_seconds["median"]),
        "simulated_seconds": None,
        "commit": header.commit,
        "layers": {
            "names": layers.names,
            "forward_seconds": layers.forward_seconds,
            "backward_seconds": layers.backward_seconds,
            "nbytes": layers.nbytes,
            "tensors": layers.tensors,
        },
        "timeline": system["timeline"],
    }


def _stands_for(header: Header, cores: float) -> dict[str, Any] | None:
    """With ``host_cores``, the cores of each worker that averaging would keep busy on that cluster if a byte cost there what it
    costs here: links are faster there by a factor, and so bytes come faster by it.

    Args:
        cores: that each worker kept busy here.
    """
    if header.stands_for is None or header.bandwidth_bps is None:
        return header.stands_for
    return {**header.stands_for, "host_cores": cores * header.stands_for["bandwidth_bps"] / header.bandwidth_bps}


def _bound(by_rank: Sequence[LayerTimes], per_byte: float) -> tuple[float, LayerTimes]:
    """``T*``, and the times of the rank it is from: no rank can go on before the slowest has contributed, so that the step
    takes at least the greatest of what the bound is with each rank's times alone. Taking the slowest rank of each layer
    instead would be no bound."""
    bounds = [
        (lower_bound(each.forward_seconds, each.backward_seconds, [per_byte * size for size in each.nbytes]), rank)
        for rank, each in enumerate(by_rank)
    ]
    bound, rank = max(bounds)
    return bound, by_rank[rank]


def _bound_with_overhead(layers: LayerTimes, per_byte: float, system: Mapping[str, Any]) -> float | None:
    """``T*`` where partitions of this system's size cost what messages were found to cost; None if it has none."""
    if system["partition_bytes"] is None:
        return None
    tensors = [(layer, size) for layer, sizes in enumerate(layers.tensors) for size in sizes]
    specs = (TensorSpec(str(index), (size // FLOAT32_BYTES,), "float32") for index, (_, size) in enumerate(tensors))
    plan = cut(Manifest(tuple(specs)), system["partition_bytes"], system["fusion_bytes"])
    partitions = [(tensors[partition.tensors[0]][0], per_byte * partition.nbytes) for partition in plan.partitions]
    return partitioned_bound(layers.forward_seconds, layers.backward_seconds, partitions, system["message_seconds"])
