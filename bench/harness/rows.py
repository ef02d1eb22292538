"""The rows of ``python -m bench train``, from the ranks' measurements. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.simulator.lower_bound import clipped_bound, first_share, partitioned_bound, wfbp

from .arguments import FLOAT32_BYTES
from .measure import TOLERATED_DIFFERENCE, LayerTimes, median_interval, slowest
from .network import Network
from .network_load import least_loads, seconds_per_byte

Row = dict[str, Any]


@dataclass(frozen=True)
class Header:
    """The values that are the same in all rows of one run and known before it.

    ``bandwidth_bps`` is the bandwidth of the slowest link. ``lane`` is the lane of the parameter server, if there is one, and
    ``flows`` the number of its connections between a worker and a shard.
    ``commit`` is the commit of the program. ``clip`` is how every loop uses all averages before an update; see ``loop.Loop``.
    ``device`` is the kind of the device that computes.
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
    clip: str | None = None
    device: str = "cpu"
    flows: int = 1


def make_rows(header: Header, by_rank: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each system. ``by_rank`` holds the result of ``turns.rank.rank_main`` on each rank."""
    network = Network(**by_rank[0]["network"])
    layers = [LayerTimes(**each) for each in by_rank[0]["layers"]]
    slowdowns = by_rank[0].get("slowdowns")  # not measured under other engines
    rows = [
        _row(header, network, layers, slowdowns, name, [rank["systems"][name] for rank in by_rank])
        for name in by_rank[0]["systems"]
    ]
    return compare_with_ddp(rows)


def slowed_bound(bound: float, by_rank: Sequence[LayerTimes], comm_seconds: float, slowdowns: Sequence[float]) -> float:
    """The least time of a step if computation takes ``slowdowns[rank]`` times as long while gradients travel.

    Suppose that a rank computes for ``x`` seconds while gradients travel, and for ``y`` seconds while none do. Then its
    computation is ``x / slowdown + y``, and ``x`` is at most ``comm_seconds``. The step takes at least ``comm_seconds + y``, so
    at least the computation and ``comm_seconds * (1 - 1 / slowdown)``.

    Args:
        bound: the bound without a slowdown.
        comm_seconds: the time for which gradients travel in each step, at least.
    """
    computed = [sum(each.forward_seconds) + sum(each.backward_seconds) for each in by_rank]
    return max([bound, *(compute + comm_seconds * (1 - 1 / slow) for compute, slow in zip(computed, slowdowns, strict=True))])


def compare_with_ddp(rows: list[Row]) -> list[Row]:
    """Fill in the speed-ups of rows that differ only in their system; None without DDP."""
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
    """A sentence for each system whose weights differ from plain averaging but should not. For a system that trains
    asynchronously the correct weights are unknown (``correct`` is None)."""
    return [_mistake(row) for row in rows if not _is_correct(row)]


def _is_correct(row: Row) -> bool:
    if "correct" in row:
        return row["correct"] is not False
    return bool(row["max_difference"] <= TOLERATED_DIFFERENCE)  # an older row of a sweep, without the key


def _mistake(row: Row) -> str:
    if row["max_difference"] is None:
        return f"{row['system']} is wrong: its weights are not finite, or training should have changed nothing"
    return (
        f"{row['system']} is wrong: its weights differ from plain averaging by {row['max_difference']:.2g} of the change "
        "that training made"
    )


def disturbed(rows: Sequence[Row]) -> list[str]:
    """A sentence for each system that was faster than the bound: the measurements behind the bound were disturbed."""
    return [
        f"{row['system']} was faster than T*, so layers or links were disturbed while they were measured alone: measure again"
        for row in rows
        if row["step_seconds"]["high"] < row["bound_seconds"]
        and row.get("correct", True) is not None  # the bound does not hold for asynchronous training
    ]


def _row(
    header: Header,
    network: Network,
    layers_by_rank: Sequence[LayerTimes],
    slowdowns: Sequence[float] | None,
    name: str,
    by_rank: Sequence[Mapping[str, Any]],
) -> Row:
    system = by_rank[0]
    # Collectives run among the workers only, even if there are servers.
    is_ps = system["transport"] == "ps"
    server_rates = network.server_rates if is_ps else []
    shards = (len(server_rates) or header.workers) if is_ps else 1
    per_byte = seconds_per_byte(network.worker_rates, server_rates)
    clips = header.clip is not None
    loads = least_loads(network.worker_rates, server_rates, clips)
    bound, layers = bound_of_ranks(layers_by_rank, loads)
    least_comm = min(per_byte for per_byte, _ in loads) * sum(layers.nbytes)
    slowed = slowdowns and slowed_bound(bound, layers_by_rank, least_comm, slowdowns)
    unclipped, _ = bound_of_ranks(layers_by_rank, least_loads(network.worker_rates, server_rates))
    times = layers.forward_seconds, layers.backward_seconds
    samples = list(slowest([rank["seconds"] for rank in by_rank]))
    step_seconds = median_interval(samples)
    compute, comm = sum(map(sum, times)), per_byte * sum(layers.nbytes)
    lane, flows = (header.lane, header.flows) if is_ps else (None, 1)
    words = system["words"] + ("" if lane is None else f", {lane} lane") + (f", {flows} flows" if flows > 1 else "")
    if lane is None and system["partition_bytes"] is not None and ":" not in name:  # such a name says its transport
        words += f", over {system['transport']}"
    cpu = sum(rank["cpu_seconds"] / len(rank["seconds"]) for rank in by_rank) / len(by_rank)
    difference = max(rank["max_difference"] for rank in by_rank)
    return {
        "system": name,
        "model": header.model,
        "workers": header.workers,
        "servers": header.servers,
        "bandwidth_bps": header.bandwidth_bps,
        "link": header.link,
        "device": header.device,
        "emulated": header.emulated,
        "transport": system["transport"],
        "lane": lane,
        "config": words,
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
        "clip": header.clip,
        "bound_seconds": bound,
        "slowdown": slowdowns and max(slowdowns),
        "slowed_bound_seconds": slowed,
        "unclipped_bound_seconds": unclipped,
        "bound_overhead_seconds": _bound_with_overhead(
            layers, per_byte, system, first_share(clips, bool(server_rates)), shards
        ),
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
        "layers": asdict(layers),
        "timeline": system["timeline"],
    }


def _stands_for(header: Header, cores: float) -> dict[str, Any] | None:
    """``header.stands_for`` with ``host_cores``: the number of cores of each worker that averaging would keep busy on the
    cluster that the row stands for, if a byte costs as much CPU there as here. Links are faster there by a factor, and so bytes
    arrive faster by the same factor.

    Args:
        cores: number of cores that each worker kept busy here.
    """
    if header.stands_for is None or header.bandwidth_bps is None:
        return header.stands_for
    return {**header.stands_for, "host_cores": cores * header.stands_for["bandwidth_bps"] / header.bandwidth_bps}


def bound_of_ranks(by_rank: Sequence[LayerTimes], loads: Sequence[tuple[float, float]]) -> tuple[float, LayerTimes]:
    """``T*`` for ``loads`` (see ``least_loads``), and the layer times of the rank that determines it.

    No rank can continue before the slowest rank has contributed. Therefore the step takes at least the greatest of the bounds
    computed from each rank's times alone. Taking the slowest rank for each layer instead would not give a bound.
    """
    bounds = [
        (clipped_bound(each.forward_seconds, each.backward_seconds, [per_byte * size for size in each.nbytes], share), rank)
        for rank, each in enumerate(by_rank)
        for per_byte, share in loads
    ]
    bound, rank = max(bounds)
    return bound, by_rank[rank]


def _bound_with_overhead(
    layers: LayerTimes, per_byte: float, system: Mapping[str, Any], share: float, shards: int
) -> float | None:
    """``T*`` with the system's partitions and the measured cost of messages; None if the system has no partitions, or
    the cost was not measured."""
    if system["partition_bytes"] is None or system["message_seconds"] is None:
        return None
    tensors = [(layer, size) for layer, sizes in enumerate(layers.tensors) for size in sizes]
    specs = (TensorSpec(str(index), (size // FLOAT32_BYTES,), "float32") for index, (_, size) in enumerate(tensors))
    plan = cut(Manifest(tuple(specs)), system["partition_bytes"], system["fusion_bytes"], shards)
    partitions = [(tensors[partition.tensors[0]][0], per_byte * partition.nbytes) for partition in plan.partitions]
    return partitioned_bound(layers.forward_seconds, layers.backward_seconds, partitions, system["message_seconds"], share)
