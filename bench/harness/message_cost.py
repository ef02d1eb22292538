"""The overhead of a partition, besides its bytes, measured with the transport in use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from commsched.core.config import SchedulerConfig

from ..collectives import average, register
from .config_barrier import ConfigBarrier
from .cpu_time import cpu_seconds

if TYPE_CHECKING:
    from commsched.session.session import Session

_PARTITIONS = (2, 4, 8, 16, 32, 64)
_REPETITIONS = 7


@dataclass(frozen=True)
class MessageCost:
    """The cost of one more partition: the seconds by which it prolongs a transfer (``link_seconds``) and the CPU seconds of one
    rank (``cpu_seconds``)."""

    link_seconds: float
    cpu_seconds: float


def measure_message_cost(
    session: Session, line: ConfigBarrier, total_bytes: int, collective: str = "all_reduce"
) -> MessageCost:
    """Measure the cost of a partition by averaging the same ``total_bytes`` in few and in many partitions. Collective.

    The configuration has changed afterwards.
    """
    _, group = register(session, "message cost", total_bytes)
    wall, cpu = {}, {}
    for partitions in _PARTITIONS:
        line.switch(SchedulerConfig(-(-total_bytes // partitions), total_bytes, collective=collective))
        average(group)  # this average may still use the old partitions
        line.meet()
        seconds, used = [], []
        for _ in range(_REPETITIONS):
            line.meet()
            cpu_began, began = cpu_seconds(), time.perf_counter()
            average(group)
            seconds.append(time.perf_counter() - began)
            line.meet()  # serving the other ranks is a cost too
            used.append(cpu_seconds() - cpu_began)
        # A synchronous transfer ends with its slowest rank. Noise only adds time, so the minimum is nearest the true value.
        by_rank = session.gather([seconds, median(used)])
        wall[partitions] = min(map(max, zip(*(each for each, _ in by_rank))))
        cpu[partitions] = median(each for _, each in by_rank)
    group.release()
    return MessageCost(slope(wall), slope(cpu))


def slope(seconds_by_partitions: Mapping[int, float]) -> float:
    """Seconds for each further partition, at least 0: ``x`` of the least-squares fit of ``a + x n + b / n``.

    ``b / n`` is the time of the last partition alone: no partition follows it through the server.
    """
    counts = np.array(list(seconds_by_partitions), float)
    matrix = np.stack([np.ones_like(counts), counts, 1 / counts], axis=1)
    solution = np.linalg.lstsq(matrix, np.array(list(seconds_by_partitions.values())), rcond=None)[0]
    return max(0.0, float(solution[1]))
