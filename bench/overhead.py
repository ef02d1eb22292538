"""The core's Python time per partition, with transports whose network takes no time: the cost of scheduling by itself."""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Callable

from commsched import SchedulerConfig
from commsched.core.core import Core
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Completion
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.task import CommTask

from .harness.arguments import add_options, at_least
from .harness.immediate import Immediate
from .harness.results import Row, table, write

_PARTITION_BYTES = 4096

_COLUMNS = {
    "completion": "completion",
    "partitions": "partitions",
    "cpu_microseconds": "CPU us/partition",
    "cpu_microseconds_min": "min",
    "cpu_microseconds_max": "max",
    "wall_microseconds": "wall us/partition",
}


class _Threaded(Immediate):
    """The same as ``Immediate``, but tasks complete in another thread, as in real transports. The figures include the cost of
    submitting to that thread."""

    def __init__(self) -> None:
        self._started: queue.SimpleQueue[tuple[CommTask, Completion] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._complete, name="commsched-bench-complete", daemon=True)
        self._thread.start()

    def start(self, task: CommTask, completion: Completion) -> None:
        self._started.put((task, completion))

    def close(self, graceful: bool = True) -> None:
        self._started.put(None)
        self._thread.join()

    def _complete(self) -> None:
        while (started := self._started.get()) is not None:
            super().start(*started)


_TRANSPORTS = {"in start": Immediate, "in a thread": _Threaded}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    partitions_help = "numbers of partitions in a step (default: 100 1000 10000)"
    parser.add_argument(
        "--partitions", type=at_least(1), nargs="+", default=[100, 1000, 10_000], metavar="N", help=partitions_help
    )
    add_options(parser, repetitions=15, json=None)


def run(args: argparse.Namespace) -> int:
    rows = [measure(how, partitions, args.repetitions) for how in _TRANSPORTS for partitions in args.partitions]
    print("begin_step, notify_ready, dispatch, sent and done, last layer first; every tensor is one partition")
    print(table(rows, _COLUMNS))
    write(args.json, rows)
    return 0


def measure(completion: str, partitions: int, repetitions: int) -> Row:
    """The cost per partition of a step of ``partitions`` partitions: median, least and greatest of ``repetitions`` steps."""
    manifest = Manifest(tuple(TensorSpec(str(index), (_PARTITION_BYTES // 4,), "float32") for index in range(partitions)))
    buffer = memoryview(bytearray(manifest.nbytes))
    transport = _TRANSPORTS[completion]()
    core = Core(transport, SchedulerConfig(_PARTITION_BYTES, 4 * _PARTITION_BYTES))
    try:
        group = core.add_group(cut(manifest, _PARTITION_BYTES), {"float32": buffer})
        _step(group)  # warm-up
        cpu, wall = zip(*(_timed(_step, group) for _ in range(repetitions)))
    finally:
        core.close()
        transport.close()
    return {
        "completion": completion,
        "partitions": partitions,
        "repetitions": repetitions,
        "cpu_microseconds": 1e6 * statistics.median(cpu) / partitions,
        "cpu_microseconds_min": 1e6 * min(cpu) / partitions,
        "cpu_microseconds_max": 1e6 * max(cpu) / partitions,
        "wall_microseconds": 1e6 * statistics.median(wall) / partitions,
    }


def _step(group: TensorGroup) -> None:
    group.begin_step()
    for tensor in reversed(range(len(group.proxies))):
        group.notify_ready(tensor)
    for proxy in group.proxies:
        proxy.wait()


def _timed(step: Callable[[TensorGroup], None], group: TensorGroup) -> tuple[float, float]:
    """CPU seconds of the whole process and wall-clock seconds of one step."""
    cpu, wall = time.process_time(), time.monotonic()
    step(group)
    return time.process_time() - cpu, time.monotonic() - wall
