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
from commsched.core.device import Device
from commsched.core.manifest import Manifest, TensorSpec
from commsched.devices import open_device
from commsched.settings import parse_rate
from commsched.testing import SimulatedDevice

from .harness.arguments import add_options, at_least, list_of, positive, setting
from .harness.job import Job, run_job
from .harness.measure import beside, beside_columns, rotated
from .harness.processes import JobFailed
from .harness.results import Row, table, write

_TIMEOUT_SECONDS = 900.0
_HOST = "the host's memory"

_COLUMNS = {"where": "gradients in", **beside_columns("the host's")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=at_least(1), default=24, metavar="N", help="number of equal layers (default: 24)")
    parser.add_argument("--megabytes", type=at_least(1), default=24, metavar="N", help="size of all gradients (default: 24)")
    parser.add_argument("--compute", type=positive, default=0.4, metavar="SECONDS", help="computation of a step (default: 0.4)")
    parser.add_argument(
        "--rate",
        type=setting(parse_rate),
        default="500mbit",
        metavar="RATE",
        help="cap of each rank's sending (default: 500mbit)",
    )
    parser.add_argument(
        "--copies",
        type=list_of(positive),
        default=(12.0, 25.0),
        metavar="GB,...",
        help="speeds of copies, in GB/s (default: 12,25)",
    )
    add_options(parser, workers=2, rounds=6, steps=3, json=None)


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
    trainings = {_HOST: _training(session, arguments, open_device("host"))}
    for number, rate in enumerate(arguments["copies"]):
        device = SimulatedDevice(seed=session.rank, number=number, copy_rate=rate * 1e9)
        trainings[f"a device, copies at {rate:g} GB/s"] = _training(session, arguments, device)
    steps = {where: step for where, (step, _) in trainings.items()}
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
    for _, require_means in trainings.values():
        require_means()
    return seconds


def _training(session: Session, arguments: Mapping[str, Any], device: Device) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that makes one step, backward and then the next forward, and one that checks its averages."""
    layers = arguments["layers"]
    specs = [TensorSpec(f"layer{index}", (arguments["megabytes"] * 250_000 // layers,), "float32") for index in range(layers)]
    manifest = Manifest(tuple(specs))
    nbytes = manifest.buffer_bytes["float32"]
    mean = np.full(nbytes // 4, sum(range(session.world_size)) / session.world_size, np.float32).tobytes()
    forward, backward = arguments["compute"] / 3 / layers, arguments["compute"] * 2 / 3 / layers
    memory, made, host, stream = device.allocate(nbytes), device.allocate(nbytes), device.allocate_host(nbytes), device.stream()
    np.frombuffer(host, np.float32)[:] = session.rank
    stream.copy(made, host)  # what backward computes
    stream.synchronize()
    group = session.register(manifest, {"float32": memory}, device)

    def step() -> None:
        group.begin_step()
        for index in reversed(range(layers)):
            time.sleep(backward)
            start, stop = manifest.offset(index), manifest.offset(index) + specs[index].nbytes
            stream.copy(memory[start:stop], made[start:stop])
            group.notify_ready(index, stream.record())
        for index in range(layers):
            group.proxies[index].wait(stream)
            stream.synchronize()  # a kernel would wait
            time.sleep(forward)

    def require_means() -> None:
        stream.copy(host, memory)
        stream.synchronize()
        if host != mean:
            raise JobFailed(f"an average of rank {session.rank} is not that of all ranks")

    return step, require_means
