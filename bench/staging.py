"""The cost of copies: a step with gradients on a simulated device, beside one with gradients in the host's memory, in turn in
the same processes, on a network that is capped.

Layers sleep for the time of their computation. The network and the schedule are real. The simulated device's copies take the
time that they take at ``--copies`` bytes per second in each direction, as those of a GPU on PCIe do, beside that of the copy in
the host's memory. Forward of a layer begins when its average is in the memory that it reads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from commsched import Session
from commsched.core.manifest import Manifest, TensorSpec
from commsched.testing import SimulatedDevice

from .harness.arguments import add_options, at_least
from .harness.job import Job, run_job
from .harness.measure import beside, rotated
from .harness.processes import JobFailed
from .harness.results import Row, table, write

_TIMEOUT_SECONDS = 900.0
_HOST = "the host's memory"

_COLUMNS = {
    "where": "gradients in",
    "milliseconds": "ms/step",
    "ratio": "of the host's",
    "ratio_low": "low",
    "ratio_high": "high",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=at_least(1), default=24, metavar="N", help="number of equal layers (default: 24)")
    parser.add_argument("--megabytes", type=at_least(1), default=24, metavar="N", help="size of all gradients (default: 24)")
    parser.add_argument("--compute", type=float, default=0.4, metavar="SECONDS", help="computation of a step (default: 0.4)")
    parser.add_argument("--rate", default="500mbit", metavar="RATE", help="cap of each rank's sending (default: 500mbit)")
    parser.add_argument(
        "--copies", type=_rates, default=[12.0, 25.0], metavar="GB,...", help="speeds of copies, in GB/s (default: 12,25)"
    )
    add_options(parser, workers=2, rounds=6, steps=3, json=None)


def _rates(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def run(args: argparse.Namespace) -> int:
    arguments = {name: getattr(args, name) for name in ("layers", "megabytes", "compute", "copies", "rounds", "steps")}
    settings = {"transport": "ps", "rate": args.rate}
    job = Job(args.workers, settings=settings, timeout_seconds=_TIMEOUT_SECONDS, auto_sizes=True)
    by_rank = run_job(job, __name__, arguments).by_rank
    shared = {**arguments, "workers": args.workers, "rate": args.rate}
    rows: list[Row] = [{**shared, "where": where, **beside(_HOST, where, by_rank)} for where in by_rank[0]]
    print(
        f"{args.megabytes} MB in {args.layers} layers, {args.compute:g} s of computation, {args.workers} ranks at {args.rate}"
    )
    print(table(rows, _COLUMNS))
    write(args.json, rows)
    return 0


# --- in each rank's process ---


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, list[float]]:
    """The seconds of a step, by turn and place.

    Raises:
        JobFailed: an average is not that of all ranks.
    """
    steps: dict[str, Callable[[], None]] = {_HOST: _training(session, arguments, None)}
    for number, rate in enumerate(arguments["copies"]):
        device = SimulatedDevice(seed=session.rank, number=number, copy_rate=rate * 1e9)
        steps[f"a device, copies at {rate:g} GB/s"] = _training(session, arguments, device)
    while not session.gather(session.is_settled)[0]:
        for step in steps.values():
            step()
    seconds: dict[str, list[float]] = {where: [] for where in steps}
    for turn in range(arguments["rounds"]):
        for where in rotated(list(steps), turn):
            session.gather(f"turn {turn} of {where}")
            steps[where]()  # does not count
            began = perf_counter()
            for _ in range(arguments["steps"]):
                steps[where]()
            seconds[where].append((perf_counter() - began) / arguments["steps"])
    return seconds


def _training(session: Session, arguments: Mapping[str, Any], device: SimulatedDevice | None) -> Callable[[], None]:
    """A function that makes one step: backward, then the next forward."""
    layers = arguments["layers"]
    specs = [TensorSpec(f"layer{index}", (arguments["megabytes"] * 250_000 // layers,), "float32") for index in range(layers)]
    manifest = Manifest(tuple(specs))
    nbytes = manifest.buffer_bytes["float32"]
    mean = np.full(nbytes // 4, sum(range(session.world_size)) / session.world_size, np.float32).tobytes()
    mine = np.full(nbytes // 4, session.rank, np.float32)
    forward, backward = arguments["compute"] / 3 / layers, arguments["compute"] * 2 / 3 / layers
    if device is None:
        flat = np.zeros(nbytes // 4, np.float32)
        group = session.register(manifest, {"float32": flat.view(np.uint8).data})
    else:
        memory, stream, pinned = device.allocate(nbytes), device.stream(), device.allocate_host(nbytes)
        made = device.allocate(nbytes)  # as a kernel would make them, without a copy from the host
        np.frombuffer(pinned, np.float32)[:] = mine
        stream.copy(made, pinned)
        stream.synchronize()
        group = session.register(manifest, {"float32": memory}, device)

    def step() -> None:
        group.begin_step()
        for index in reversed(range(layers)):
            time.sleep(backward)
            start, stop = manifest.offset(index), manifest.offset(index) + specs[index].nbytes
            if device is None:
                flat[start // 4 : stop // 4] = mine[start // 4 : stop // 4]
                group.notify_ready(index)
            else:
                stream.copy(memory[start:stop], made[start:stop])
                group.notify_ready(index, stream.record())
        for index in range(layers):
            if device is None:
                group.proxies[index].wait()
            else:
                group.proxies[index].wait(stream)
                stream.synchronize()  # a kernel would wait
            time.sleep(forward)
        _require_means()

    def _require_means() -> None:
        averages = flat.tobytes() if device is None else device.peek(memory)
        if averages != mean:
            raise JobFailed(f"an average of rank {session.rank} is not that of all ranks")

    return step
