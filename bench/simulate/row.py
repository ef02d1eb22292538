"""A simulated step as a row of results, with the keys of a measured one."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, NamedTuple

from commsched.simulator.lower_bound import clipped_bound, first_share, lower_bound, partitioned_bound, wfbp
from commsched.simulator.profile import Profile
from commsched.simulator.scenario import Cluster, Exchange, Rules, WorkerClass, bytes_factor
from commsched.simulator.simulate import Outcome, simulate

from ..harness.measure import LayerTimes

_STRAGGLER_STEPS = 6  # after a few steps, all steps are alike


class Case:
    """A model on equal machines, of which one may compute more slowly.

    Args:
        partition_seconds: overhead of each partition or all-reduce, besides its bytes.
        straggler: factor by which the last worker's layers take longer than the others'.
        copy_rate: bytes per second of copies between a device and its host; None: gradients are in the host's memory.
    """

    def __init__(
        self,
        profile: Profile,
        workers: int,
        servers: int,
        rate_bytes_per_second: float,
        *,
        partition_seconds: float,
        latency_seconds: float = 0.0,
        straggler: float = 1.0,
        copy_rate: float | None = None,
        detailed: bool = False,
    ) -> None:
        self.profile = profile
        self.workers = workers
        self.servers = servers
        self.rate_bytes_per_second = rate_bytes_per_second
        self.partition_seconds = partition_seconds
        self.latency_seconds = latency_seconds
        self.straggler = straggler
        self.copy_rate = copy_rate
        self.detailed = detailed

    def simulate(self, rules: Rules) -> Outcome:
        return simulate(self.profile, self._cluster(rules), rules, _STRAGGLER_STEPS if self.straggler != 1 else 1)

    def seconds(self, rules: Rules) -> float:
        """Seconds of a step; of the last step if steps differ."""
        return self.simulate(rules).step_seconds[-1]

    def bytes_factor(self, rules: Rules) -> float:
        """Bytes on the busiest NIC per byte of gradient. Collectives run among the workers only, even if there are servers."""
        return bytes_factor(self.workers, self.servers if rules.exchange is Exchange.PARAMETER_SERVER else 0)

    @cached_property
    def slowest_profile(self) -> Profile:
        return self.profile.scaled(seconds=max(1.0, self.straggler))

    def _cluster(self, rules: Rules) -> Cluster:
        rate = self.rate_bytes_per_second
        others = self.workers - (self.straggler != 1)
        classes = [WorkerClass(rate)] * others if self.detailed else [WorkerClass(rate, others)] if others else []
        if self.straggler != 1:
            classes.append(WorkerClass(rate, 1, self.straggler))
        message_seconds = self.partition_seconds
        if rules.exchange is Exchange.PARAMETER_SERVER and self.bytes_factor(rules) > 0:
            # ``bytes_factor`` is the number of messages per partition on the busiest NIC, in each direction.
            message_seconds /= self.bytes_factor(rules)
        return Cluster(tuple(classes), (rate,) * self.servers, self.latency_seconds, message_seconds, self.copy_rate)


class _Bounds(NamedTuple):
    best: float
    with_overhead: float
    fifo: float
    unclipped: float


def make_row(case: Case, system: str, rules: Rules, clip: str | None = None) -> dict[str, Any]:
    """A row with the keys of ``bench train``. Values that only a measurement has are None, and ``simulated`` is True.

    ``clip`` is ``"norm"`` if ``rules`` are those of a loop that clips.
    """
    outcome = case.simulate(rules)
    seconds = outcome.step_seconds[-1]
    profile = case.slowest_profile
    comm = case.bytes_factor(rules) * profile.nbytes / case.rate_bytes_per_second
    bounds = _bounds(case, rules, outcome, clip is not None)
    cuts = rules.bucket_bytes is None
    return {
        "system": system,
        "model": profile.model,
        "workers": case.workers,
        "servers": case.servers,
        "bandwidth_bps": 8 * case.rate_bytes_per_second,
        "link": "simulated",
        "emulated": False,
        "simulated": True,
        "transport": "ps" if rules.exchange is Exchange.PARAMETER_SERVER else "collectives",
        "lane": None,
        "config": describe(rules),
        "partition_bytes": rules.config.partition_bytes if cuts else None,
        "credit_bytes": rules.config.credit_bytes if cuts else None,
        "gradient_bytes": profile.nbytes,
        "link_bytes_per_second": case.rate_bytes_per_second,
        "per_message_seconds": case.partition_seconds,
        "compute_seconds": profile.compute_seconds,
        "comm_seconds": comm,
        "rho": comm / profile.compute_seconds,
        "step_seconds": {"median": seconds, "low": seconds, "high": seconds, "count": 1},
        "step_samples": [seconds],
        "clip": clip,
        "bound_seconds": bounds.best,
        "unclipped_bound_seconds": bounds.unclipped,
        "bound_overhead_seconds": bounds.with_overhead,
        "fifo_bound_seconds": bounds.fifo,
        "efficiency": bounds.best / seconds,
        "speedup_vs_ddp": None,
        "speedup_vs_ddp_tuned": None,
        "possible_speedup_vs_ddp": None,
        "exposed_seconds": seconds - profile.compute_seconds,
        "cpu_seconds_per_step": None,
        "max_difference": None,
        "correct": None,
        "stands_for": None,
        "simulated_seconds": seconds,
        "commit": None,
        "layers": asdict(LayerTimes.of(profile)),
        "timeline": list(outcome.timeline),
    }


def describe(rules: Rules) -> str:
    """The configuration in words, for readers."""
    if rules.bucket_bytes is not None:
        return f"buckets {rules.bucket_bytes / 2**20:.3g} MiB"
    whole = replace(rules.config, partition_bytes=0) if rules.config.partition_bytes >= 256 * 2**20 else rules.config
    size = f"partition {whole.partition_bytes / 1e6:.3g} MB" if whole.partition_bytes else "whole tensors"
    return f"{size}, credit {rules.config.credit_bytes / 1e6:.3g} MB"


def _bounds(case: Case, rules: Rules, outcome: Outcome, clips: bool) -> _Bounds:
    profile = case.slowest_profile
    per_byte = case.bytes_factor(rules) / case.rate_bytes_per_second
    forward = [layer.forward_seconds for layer in profile.layers]
    backward = [layer.backward_seconds for layer in profile.layers]
    comm = [per_byte * layer.nbytes for layer in profile.layers]
    grouping = outcome.grouping
    partitions = [
        (layers[0], per_byte * partition.nbytes) for layers, partition in zip(grouping.layers_of, grouping.plan.partitions)
    ]
    share = first_share(clips, case.servers > 0 and rules.exchange is Exchange.PARAMETER_SERVER)
    overhead = case.partition_seconds if case.workers > 1 or case.servers else 0.0
    return _Bounds(
        clipped_bound(forward, backward, comm, share),
        partitioned_bound(forward, backward, partitions, overhead, share),
        wfbp(forward, backward, comm),
        lower_bound(forward, backward, comm),
    )
