"""What a partition costs besides its bytes, measured with the transport that is used."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from commsched.core.config import SchedulerConfig

from ..collectives import average, register
from ..cpu_time import cpu_seconds
from .start_line import StartLine

if TYPE_CHECKING:
    from commsched.session import Session

_PARTITIONS = (2, 4, 8, 16, 32, 64)
_REPETITIONS = 7


@dataclass(frozen=True)
class MessageCost:
    """Seconds by which one more partition prolongs a transfer, and seconds of one rank's processor that it takes."""

    link_seconds: float
    cpu_seconds: float


def measure_message_cost(session: Session, line: StartLine, total_bytes: int, policy: str = "priority") -> MessageCost:
    """Average the same ``total_bytes`` in few and in many partitions, and see what they cost each. Collective.

    The configuration is another one afterwards.
    """
    _, group = register(session, "message cost", total_bytes)
    wall, cpu = {}, {}
    for partitions in _PARTITIONS:
        line.switch(SchedulerConfig(-(-total_bytes // partitions), total_bytes, policy))
        average(group)  # may be in the partitions before
        line.meet()
        seconds, used = [], []
        for _ in range(_REPETITIONS):
            line.meet()
            cpu_began, began = cpu_seconds(), time.perf_counter()
            average(group)
            seconds.append(time.perf_counter() - began)
            line.meet()  # what serves the other ranks is a cost too
            used.append(cpu_seconds() - cpu_began)
        # A synchronous transfer ends with its slowest rank; noise only ever adds, so the least is nearest the truth.
        by_rank = session.gather([seconds, median(used)])
        wall[partitions] = min(map(max, zip(*(each for each, _ in by_rank))))
        cpu[partitions] = median(each for _, each in by_rank)
    group.release()
    return MessageCost(slope(wall), slope(cpu))


def slope(seconds_by_partitions: Mapping[int, float]) -> float:
    """Seconds for each further partition, at least 0: ``x`` of the least-squares fit of ``a + x n + b / n``.

    ``b / n`` is the last partition on its own: nothing follows it through the server.
    """
    counts = np.array(list(seconds_by_partitions), float)
    matrix = np.stack([np.ones_like(counts), counts, 1 / counts], axis=1)
    solution = np.linalg.lstsq(matrix, np.array(list(seconds_by_partitions.values())), rcond=None)[0]
    return max(0.0, float(solution[1]))
