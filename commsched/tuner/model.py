"""Step times of configurations that were not tried, simulated from measured layer and link times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..core.plan import merged_bytes
from ..core.scheduler import SchedulerConfig
from ..simulator import Cluster, Exchange, FairShareCache, Rules, equal_workers, simulate
from ..simulator.profile import ITEMSIZE, Grouping, LayerProfile, Profile
from ..simulator.scenario import bytes_factor
from .profiler import LinkEstimate
from .space import MAX_TUNED_PARTITION_BYTES, MIN_TUNED_PARTITION_BYTES, max_ratio

#: A step of up to ``_MAX_MESSAGES`` messages is simulated as it is, which takes about 0.1 s of CPU. A step of more messages is
#: far from the best in most cases. It is simulated with ``_COARSE_MESSAGES`` messages of coarser partitions; such step times
#: came out up to 18 % too long, and up to 47 % too long with separate servers.
_MAX_MESSAGES = 1600
_COARSE_MESSAGES = 600

#: A profile of more layers is simulated with neighbouring layers merged.
_MAX_LAYERS = 500

#: Up to this number of workers, each worker is simulated by itself. More workers are simulated as one, which is off by 12 % at
#: times, but does not take longer with their number.
_DETAILED_WORKERS = 4

#: Least credit in partitions that is simulated. With one partition over a parameter server, simulated workers, which run in
#: lockstep, all push to the same shard. Real workers drift apart; they were hardly slower with one partition than with two.
#: With one partition in collectives, real links are idle between its two phases and until the next is launched. The simulation
#: knows neither, so it would take one partition for the best credit: 4 workers took 2064 ms over gloo instead of the simulated
#: 1945.
_MIN_IN_FLIGHT = 2

#: Number of trials in a calibration, number of its iterations, and the step of its finite differences in logarithms.
_MAX_TRIALS = 4
_ITERATIONS = 4
_STEP = 0.2

#: Standard deviations of logarithms: of simulated step times, and of the first estimate of a link (rate, overhead, latency).
_MODEL_DEVIATION = 0.02
_LINK_DEVIATIONS = np.array([0.5, 1.5, 0.7])

FloatArray = NDArray[np.float64]


class Model:
    """Simulates ``profile`` on equal workers around ``link``. Not thread-safe.

    A step is simulated at the points of a lattice: partitions of ``anchor_bytes`` times a power of two, and credit of a power
    of two in partitions. Between these points the logarithm of the step time is interpolated. Each point is simulated once,
    when it is first needed. A step with very many messages or layers is simulated with fewer, larger ones of the same total
    cost.

    A reduce-scatter and an all-gather are simulated as one all-reduce, because there is no model of them. Stragglers are not
    modelled either.

    Args:
        workers: number of workers that use the network; with a hierarchy, number of hosts.
        servers: number of separate servers; 0 means a shard on every worker.
        ordered: whether partitions are averaged by collectives, one at a time.
        anchor_bytes: a partition size of the lattice, for example the incumbent's.
        processor_seconds: processor time by which each partition prolongs a step, where computation lacks it.

    Raises:
        ValueError: there are fewer than two workers, or the profile has nothing to send.
    """

    def __init__(
        self,
        profile: Profile,
        link: LinkEstimate,
        workers: int,
        *,
        servers: int = 0,
        ordered: bool = False,
        anchor_bytes: int = 1_000_000,
        processor_seconds: float = 0.0,
    ) -> None:
        if workers < 2 or profile.nbytes == 0:
            raise ValueError(f"{workers} workers, {profile.nbytes} bytes: nothing goes over the network")
        self.link = link
        self._profile = profile
        self._merged = _merge(profile)
        self._workers = workers
        self._servers = 0 if ordered else servers
        self._ordered = ordered
        self._anchor_bytes = anchor_bytes
        self._processor_seconds = processor_seconds
        self._largest_ratio = max_ratio(workers, servers, ordered)
        self._known: dict[SchedulerConfig, float] = {}

    def predict(self, config: SchedulerConfig) -> float:
        """Seconds of a step with ``config``."""
        partition = math.log2(
            min(max(config.partition_bytes, MIN_TUNED_PARTITION_BYTES), self._largest_bytes) / self._anchor_bytes
        )
        ratio = math.log2(min(max(config.credit_bytes / config.partition_bytes, 1.0), self._largest_ratio))
        logs = 0.0
        for octave, share in _between(partition):
            for multiple, part in _between(ratio):
                logs += share * part * math.log(self._at(octave, multiple, config))
        return math.exp(logs)

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Model:
        """The same model with the link whose simulated step times are closest to the measured ones. Each trial is
        ``(config, seconds)``; only the last few count.

        Rate, overhead and latency are fitted together by least squares on logarithms (Gauss-Newton). The estimate so far is
        the prior, because steps whose communication is hidden behind computation say little about the network. With
        ``processor_seconds`` they say nothing about it, and the link stays as it is: processors decide there.

        Raises:
            ValueError: a time is not a positive number.
        """
        if any(not 0 < seconds < math.inf for _, seconds in trials):
            raise ValueError(f"not the times of steps: {[seconds for _, seconds in trials]}")
        if self._processor_seconds:
            return self
        trials = trials[-_MAX_TRIALS:]
        measured = np.log([seconds for _, seconds in trials])

        def simulated(logs: FloatArray) -> FloatArray:
            link = self._scaled(logs)
            return np.log([self._simulate(config, link) for config, _ in trials])

        def cost(logs: FloatArray, found: FloatArray) -> float:
            off = np.concatenate([(found - measured) / _MODEL_DEVIATION, logs / _LINK_DEVIATIONS])
            return float(off @ off)

        best = np.zeros(len(_LINK_DEVIATIONS))
        found = simulated(best)
        for _ in range(_ITERATIONS if trials else 0):
            slopes = [(simulated(best + step) - found) / _STEP for step in _STEP * np.eye(len(best))]
            rows = np.concatenate([np.stack(slopes, axis=1) / _MODEL_DEVIATION, np.diag(1 / _LINK_DEVIATIONS)])
            off = np.concatenate([(measured - found) / _MODEL_DEVIATION, -best / _LINK_DEVIATIONS])
            change = np.clip(np.linalg.lstsq(rows, off, rcond=None)[0], -1.5, 1.5)
            then = simulated(best + change)
            if cost(best + change, then) >= cost(best, found):
                break
            best, found = best + change, then
            if np.abs(change).max() < 0.02:
                break
        calibrated = Model(
            self._profile,
            self._scaled(best),
            self._workers,
            servers=self._servers,
            ordered=self._ordered,
            anchor_bytes=self._anchor_bytes,
        )
        calibrated._shares = self._shares  # the NICs are the same, in units of their rate
        return calibrated

    def _scaled(self, logs: FloatArray) -> LinkEstimate:
        per_byte, partition, latency = np.exp(logs)
        link = self.link
        return replace(
            link,
            seconds_per_byte=link.seconds_per_byte * float(per_byte),
            partition_seconds=link.partition_seconds * float(partition),
            latency_seconds=link.latency_seconds * float(latency),
        )

    @property
    def _largest_bytes(self) -> int:
        return min(MAX_TUNED_PARTITION_BYTES, max(self._profile.nbytes, MIN_TUNED_PARTITION_BYTES))

    @property
    def _factor(self) -> float:
        return bytes_factor(self._workers, self._servers)

    @cached_property
    def _shares(self) -> FairShareCache:
        return FairShareCache(self._cluster(0.0, 0.0))

    def _at(self, octave: int, multiple: int, like: SchedulerConfig) -> float:
        size = round(self._anchor_bytes * 2.0**octave)
        config = replace(like, partition_bytes=size, credit_bytes=size * 2**multiple)
        if config not in self._known:
            self._known[config] = self._simulate(config, self.link)
        return self._known[config]

    def _simulate(self, config: SchedulerConfig, link: LinkEstimate) -> float:
        credit_bytes = max(config.credit_bytes, _MIN_IN_FLIGHT * config.partition_bytes)
        exchange = Exchange.ALL_REDUCE if self._ordered else Exchange.PARAMETER_SERVER
        rules = Rules(replace(config, credit_bytes=credit_bytes), exchange)
        count = self._partitions(self._profile, rules)
        messages = count * self._messages_per_partition
        if messages > _MAX_MESSAGES:
            rules = replace(rules, config=_coarser(rules.config, messages / _COARSE_MESSAGES, self._profile.nbytes / count))
        coarser = count / self._partitions(self._merged, rules)
        # The time unit is a NIC's time for one byte, so that simulated NICs are the same for every link.
        unit = link.seconds_per_byte / self._factor
        partition_seconds = link.partition_seconds * coarser / unit
        if not self._ordered:
            partition_seconds /= self._factor  # number of messages per partition on the busiest NIC, in each direction
        shares = None if self._ordered else self._shares
        cluster = self._cluster(partition_seconds, link.latency_seconds / unit)
        simulated = simulate(self._merged.scaled(seconds=1 / unit), cluster, rules, shares=shares).step_seconds[0]
        return unit * simulated + count * self._processor_seconds

    def _cluster(self, message_seconds: float, latency_seconds: float) -> Cluster:
        times = {"message_seconds": message_seconds, "latency_seconds": latency_seconds}
        return equal_workers(self._workers, 1.0, self._servers, detailed=self._is_detailed, **times)

    @property
    def _is_detailed(self) -> bool:
        return not self._ordered and self._workers <= _DETAILED_WORKERS

    @property
    def _messages_per_partition(self) -> int:
        if self._ordered:
            return 1
        if not self._is_detailed:
            return 2
        return 2 * (self._workers if self._servers else self._workers - 1)  # a worker sends none to its own shard

    def _partitions(self, profile: Profile, rules: Rules) -> int:
        return len(Grouping.of(profile, rules, self._servers or self._workers).plan.partitions)


def _coarser(config: SchedulerConfig, factor: float, mean_bytes: float) -> SchedulerConfig:
    """``config`` with about ``factor`` times fewer partitions. ``mean_bytes`` is their mean size now; it is the least
    ``fusion_bytes`` to scale, because a value below the size of every tensor would merge none even after scaling."""
    fusion_bytes = merged_bytes(config.partition_bytes, config.fusion_bytes)
    return replace(
        config,
        partition_bytes=round(factor * config.partition_bytes),
        credit_bytes=round(factor * config.credit_bytes),
        fusion_bytes=round(factor * max(fusion_bytes, mean_bytes)),
    )


def _merge(profile: Profile) -> Profile:
    """``profile`` with at most ``_MAX_LAYERS`` layers. Runs of neighbours, of equal length, become one layer of one tensor."""
    if len(profile.layers) <= _MAX_LAYERS:
        return profile
    layers = []
    each = math.ceil(len(profile.layers) / _MAX_LAYERS)
    for first in range(0, len(profile.layers), each):
        merged = profile.layers[first : first + each]
        elements = sum(layer.nbytes for layer in merged) // ITEMSIZE
        times = sum(layer.forward_seconds for layer in merged), sum(layer.backward_seconds for layer in merged)
        layers.append(LayerProfile(merged[0].name, ((elements,),) if elements else (), *times))
    return replace(profile, layers=tuple(layers))


def _between(x: float) -> list[tuple[int, float]]:
    """The whole numbers on both sides of ``x``, with their interpolation weights."""
    below = math.floor(x)
    part = x - below
    return [(below, 1.0)] if part < 1e-6 else [(below, 1 - part), (below + 1, part)]
