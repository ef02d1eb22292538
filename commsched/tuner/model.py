"""Step times of configurations that were not tried, simulated from what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..core.config import SchedulerConfig
from ..core.manifest import Manifest
from ..core.plan import cut
from ..simulator import Cluster, Exchange, Rules, Shares, equal_workers, simulate
from ..simulator.bytes_factor import bytes_factor
from ..simulator.profile import ITEMSIZE, Layer, Profile
from ..simulator.tensors import Tensors
from .profiler import Link
from .space import MAX_PARTITION_BYTES, MAX_RATIO, MIN_PARTITION_BYTES

#: Up to so many messages, which take about 0.1 s of CPU, a step is simulated as it is. What has more is far from the best in
#: most cases, and is simulated with so many, of coarser partitions: that came out up to 18 % longer, and up to
#: 47 % with separate servers.
_MOST_MESSAGES = 1600
_COARSE_MESSAGES = 600

#: Of more layers some are merged with their neighbours.
_MOST_LAYERS = 500

#: Up to so many workers each is simulated by itself; beyond, all as one, which is off by 12 % at times but takes no longer.
_DETAILED_WORKERS = 4

#: To a parameter server, credit is simulated as for so many partitions at least. With one, simulated workers, which keep step,
#: all push to the same shard; real ones drift apart, and were hardly slower than with two.
_LEAST_PUSHES = 2

#: Trials that a calibration looks at, iterations of it, and the step of its differences in logarithms.
_MOST_TRIALS = 4
_ITERATIONS = 4
_STEP = 0.2

#: Standard deviations of logarithms: of simulated step times, and of what a link was first taken for (rate, overhead).
_MODEL_DEVIATION = 0.02
_LINK_DEVIATIONS = np.array([0.5, 1.5])

Floats = NDArray[np.float64]


class Model:
    """Simulates ``profile`` on equal workers around ``link``. Not thread-safe.

    A step is simulated on a lattice: partitions of ``anchor_bytes`` times powers of two, credit of a power of two of them; what
    lies between is interpolated, in logarithms. Each point is simulated once, when it is first needed. What has very many
    messages, or layers, is simulated with fewer, larger ones that cost as much together.

    ``rsag`` is simulated as ``priority``: there is no model of its halves. A straggler, and hosts that are short of
    processor time, are not modelled either.

    Args:
        workers: that meet in the network; with a hierarchy, hosts.
        servers: separate ones; 0: a shard on every worker.
        collective: partitions are averaged by collectives, one at a time.
        anchor_bytes: a partition size, the incumbent's say.

    Raises:
        ValueError: there are fewer than two workers, or the profile has nothing to send.
    """

    def __init__(
        self,
        profile: Profile,
        link: Link,
        workers: int,
        *,
        servers: int = 0,
        collective: bool = False,
        anchor_bytes: int = 1_000_000,
    ) -> None:
        if workers < 2 or profile.nbytes == 0:
            raise ValueError(f"{workers} workers, {profile.nbytes} bytes: nothing goes over the network")
        self.link = link
        self._profile = profile
        self._manifest = Tensors.of(profile).manifest
        self._merged = _merge(profile)
        self._merged_manifest = Tensors.of(self._merged).manifest
        self._workers = workers
        self._servers = 0 if collective else servers
        self._collective = collective
        self._anchor_bytes = anchor_bytes
        self._known: dict[SchedulerConfig, float] = {}

    def predict(self, config: SchedulerConfig) -> float:
        """Seconds of a step with ``config``."""
        partition = math.log2(min(max(config.partition_bytes, MIN_PARTITION_BYTES), self._largest_bytes) / self._anchor_bytes)
        ratio = math.log2(min(max(config.credit_bytes / config.partition_bytes, 1.0), MAX_RATIO))
        logs = 0.0
        for octave, share in _between(partition):
            for multiple, part in _between(ratio):
                logs += share * part * math.log(self._at(octave, multiple, config))
        return math.exp(logs)

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> Model:
        """The same model with a link whose simulated steps are closest to those measured: ``(config, seconds)``, of which the
        last few count.

        Rate and overhead are fitted together by least squares on logarithms (Gauss-Newton), and held by what they were
        taken for so far: steps that computation hides say little of the network.

        Raises:
            ValueError: a time is not a positive number.
        """
        if any(not 0 < seconds < math.inf for _, seconds in trials):
            raise ValueError(f"not the times of steps: {[seconds for _, seconds in trials]}")
        trials = trials[-_MOST_TRIALS:]
        measured = np.log([seconds for _, seconds in trials])

        def simulated(logs: Floats) -> Floats:
            link = self._scaled(logs)
            return np.log([self._simulate(config, link) for config, _ in trials])

        def cost(logs: Floats, found: Floats) -> float:
            off = np.concatenate([(found - measured) / _MODEL_DEVIATION, logs / _LINK_DEVIATIONS])
            return float(off @ off)

        best = np.zeros(2)
        found = simulated(best)
        for _ in range(_ITERATIONS if trials else 0):
            slopes = [(simulated(best + step) - found) / _STEP for step in _STEP * np.eye(2)]
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
            collective=self._collective,
            anchor_bytes=self._anchor_bytes,
        )
        calibrated._shares = self._shares  # of the same NICs, in units of their rate
        return calibrated

    def _scaled(self, logs: Floats) -> Link:
        per_byte, partition = np.exp(logs)
        link = self.link
        return replace(
            link,
            seconds_per_byte=link.seconds_per_byte * float(per_byte),
            partition_seconds=link.partition_seconds * float(partition),
        )

    @property
    def _largest_bytes(self) -> int:
        return min(MAX_PARTITION_BYTES, max(self._profile.nbytes, MIN_PARTITION_BYTES))

    @property
    def _factor(self) -> float:
        return bytes_factor(self._workers, self._servers)

    @cached_property
    def _shares(self) -> Shares:
        return Shares(self._cluster(0.0))

    def _at(self, octave: int, multiple: int, like: SchedulerConfig) -> float:
        size = round(self._anchor_bytes * 2.0**octave)
        config = replace(like, partition_bytes=size, credit_bytes=size * 2**multiple)
        if config not in self._known:
            self._known[config] = self._simulate(config, self.link)
        return self._known[config]

    def _simulate(self, config: SchedulerConfig, link: Link) -> float:
        policy = "priority" if config.policy == "rsag" else config.policy
        credit_bytes = max(config.credit_bytes, (1 if self._collective else _LEAST_PUSHES) * config.partition_bytes)
        exchange = Exchange.ALL_REDUCE if self._collective else Exchange.PARAMETER_SERVER
        rules = Rules(replace(config, credit_bytes=credit_bytes, policy=policy), exchange)
        count = _partitions(self._manifest, rules.config)
        messages = count * self._messages_per_partition
        if messages > _MOST_MESSAGES:
            rules = replace(rules, config=_coarser(rules.config, messages / _COARSE_MESSAGES, self._profile.nbytes / count))
        coarser = count / _partitions(self._merged_manifest, rules.config)
        # In units of what a NIC takes for one byte, so that NICs are the same whatever the link is.
        unit = link.seconds_per_byte / self._factor
        partition_seconds = link.partition_seconds * coarser / unit
        if not self._collective:
            partition_seconds /= self._factor  # a partition is so many messages on the busiest NIC in each direction
        shares = None if self._collective else self._shares
        cluster = self._cluster(partition_seconds)
        return unit * simulate(self._merged.scaled(seconds=1 / unit), cluster, rules, shares=shares).step_seconds[0]

    def _cluster(self, message_seconds: float) -> Cluster:
        return equal_workers(self._workers, 1.0, self._servers, message_seconds=message_seconds, detailed=self._is_detailed)

    @property
    def _is_detailed(self) -> bool:
        return not self._collective and self._workers <= _DETAILED_WORKERS

    @property
    def _messages_per_partition(self) -> int:
        if self._collective:
            return 1
        if not self._is_detailed:
            return 2
        return 2 * (self._workers if self._servers else self._workers - 1)  # to a worker's own shard none goes


def _partitions(manifest: Manifest, config: SchedulerConfig) -> int:
    return len(cut(manifest, config.partition_bytes, config.fusion_bytes).partitions)


def _coarser(config: SchedulerConfig, factor: float, mean_bytes: float) -> SchedulerConfig:
    """With about so many times fewer partitions, which have ``mean_bytes`` now. ``fusion_bytes`` may be below any tensor, and
    would then merge none however often it was doubled."""
    fusion_bytes = config.fusion_bytes
    return replace(
        config,
        partition_bytes=round(factor * config.partition_bytes),
        credit_bytes=round(factor * config.credit_bytes),
        fusion_bytes=None if fusion_bytes is None else round(factor * max(fusion_bytes, mean_bytes)),
    )


def _merge(profile: Profile) -> Profile:
    """Neighbours merged into one layer of one tensor, as many into each, so that there are at most so many layers."""
    if len(profile.layers) <= _MOST_LAYERS:
        return profile
    layers = []
    each = math.ceil(len(profile.layers) / _MOST_LAYERS)
    for first in range(0, len(profile.layers), each):
        merged = profile.layers[first : first + each]
        elements = sum(layer.nbytes for layer in merged) // ITEMSIZE
        times = sum(layer.forward_seconds for layer in merged), sum(layer.backward_seconds for layer in merged)
        layers.append(Layer(merged[0].name, ((elements,),) if elements else (), *times))
    return replace(profile, layers=tuple(layers))


def _between(x: float) -> list[tuple[int, float]]:
    """The whole numbers beside ``x``, and how much each counts."""
    below = math.floor(x)
    part = x - below
    return [(below, 1.0)] if part < 1e-6 else [(below, 1 - part), (below + 1, part)]
