"""The cost of a partition, measured with the transport in use."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from commsched import SchedulerConfig, Session

from .averaging import ConfigBarrier, average, register

_PARTITIONS = (2, 4, 8, 16, 32, 64)
_REPETITIONS = 4


def measure_message_seconds(
    session: Session, barrier: ConfigBarrier, total_bytes: int, collective: str = "all_reduce"
) -> float:
    """Measure the seconds by which one more partition prolongs a transfer, by averaging the same ``total_bytes`` in few and in
    many partitions. Collective.

    The configuration has changed afterwards.
    """
    _, group = register(session, "message cost", total_bytes)
    wall = {}
    for partitions in _PARTITIONS:
        barrier.switch(SchedulerConfig(-(-total_bytes // partitions), total_bytes, collective=collective))
        average(group)  # this average may still use the old partitions
        seconds = []
        for _ in range(_REPETITIONS):
            barrier.wait()
            began = time.perf_counter()
            average(group)
            seconds.append(time.perf_counter() - began)
        # A synchronous transfer ends with its slowest rank. Noise only adds time, so the minimum is nearest the true value.
        wall[partitions] = min(map(max, zip(*session.gather(seconds))))
    group.release()
    return slope(wall)


def slope(seconds_by_partitions: Mapping[int, float]) -> float:
    """Seconds for each further partition, at least 0: ``x`` of the least-squares fit of ``a + x n + b / n``.

    ``b / n`` is the time of the last partition alone: no partition follows it through the server.
    """
    counts = np.array(list(seconds_by_partitions), float)
    matrix = np.stack([np.ones_like(counts), counts, 1 / counts], axis=1)
    solution = np.linalg.lstsq(matrix, np.array(list(seconds_by_partitions.values())), rcond=None)[0]
    return max(0.0, float(solution[1]))
