"""``python -m bench demo``: the scheduler's gain on a small real training over a capped link, beside the bound.

Two workers train a convolutional network on scikit-learn's digits through the embedded parameter server. Within one training,
blocks of steps in FIFO order and with the scheduler alternate (A B A B). The link is EMULATED: every rank caps its sending
rate. The computation is real.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from commsched import ConfigError
from commsched.cli.launch import run as launch
from commsched.settings import parse_rate
from commsched.simulator.lower_bound import lower_bound, wfbp
from commsched.simulator.scenario import bytes_factor

from .demo_worker import BLOCK_STEPS
from .harness.arguments import add_options, at_least, setting
from .harness.job import require_no_launcher
from .harness.measure import median_interval
from .harness.processes import JobFailed
from .harness.results import Row, write

WANTED_ACCURACY = 0.95


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, workers=2, partition="auto", credit="auto", json=None)
    parser.add_argument("--steps", type=at_least(6 * BLOCK_STEPS), default=18 * BLOCK_STEPS, help="training steps")
    parser.add_argument("--measure-steps", type=at_least(8), default=24, help="steps without communication, to time the layers")
    rate_help = "greatest rate of each worker; without it: communication takes as long as computation"
    parser.add_argument("--rate", type=setting(parse_rate), help=rate_help)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="directory for the timeline")


def run(args: argparse.Namespace) -> int:
    require_no_launcher()
    workers = args.workers
    print(f"1. timing the layers: {workers} workers train for {args.measure_steps} steps without communication", flush=True)
    layers = _launch(workers, "measure", args.measure_steps, {"COMMSCHED_DISABLE": "1"})
    megabytes = sum(layers["nbytes"]) / 1e6
    rate = args.rate or _rate_for_equal_times(layers, workers)
    print(
        f"2. training: {args.steps} steps of {megabytes:.1f} MB of gradients through the embedded parameter server, each\n"
        f"   worker capped at {rate} (EMULATED link); once commsched has chosen partition and credit, {BLOCK_STEPS} steps in\n"
        f"   FIFO order and {BLOCK_STEPS} with the scheduler take turns",
        flush=True,
    )
    settings = {"RATE": rate, "PARTITION": args.partition, "CREDIT": args.credit, "TRACE": str(args.out)}
    trained = _launch(workers, "train", args.steps, {f"COMMSCHED_{key}": value for key, value in settings.items()})
    rows = _rows(layers, trained, rate, workers)
    _print(rows, trained, args.out)
    write(args.json, rows)
    if not trained["equal"] or trained["accuracy"] < WANTED_ACCURACY:
        print(f"the training is wrong: expected equal weights and an accuracy of {WANTED_ACCURACY:.0%}", file=sys.stderr)
        return 1
    return 0


def _launch(workers: int, what: str, steps: int, settings: Mapping[str, str]) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        command = [sys.executable, "-m", f"{__package__}.demo_worker", what, "--steps", str(steps), "--out", str(out)]
        code = launch(workers, 0, command, {**os.environ, **settings})
        if code != 0:
            raise JobFailed(f"a worker ended with exit code {code}")
        return json.loads(out.read_text())


def _rate_for_equal_times(layers: Mapping[str, Any], workers: int) -> str:
    """The rate at which all gradients take as long as one step of computation (rho = 1), where the order matters most."""
    bits = 8 * bytes_factor(workers) * sum(layers["nbytes"])
    return f"{max(1, round(bits / layers['step_seconds'] / 1e6))}mbit"


def _rows(layers: Mapping[str, Any], trained: Mapping[str, Any], rate: str, workers: int) -> list[Row]:
    try:
        bytes_per_second = parse_rate(rate)
    except ConfigError as error:
        raise JobFailed(str(error)) from error
    comm = [bytes_factor(workers) * nbytes / bytes_per_second for nbytes in layers["nbytes"]]
    times = layers["forward_seconds"], layers["backward_seconds"], comm
    # The loop's work between steps belongs to no layer: it can be overlapped, but not skipped.
    bound = max(lower_bound(*times), layers["step_seconds"])
    rows: list[Row] = []
    for policy, seconds in trained["seconds"].items():
        rows.append(
            {
                "system": "commsched" if policy == "priority" else policy,
                "model": "digits, 6 convolutions",
                "workers": workers,
                "servers": 0,
                "bandwidth_bps": 8 * bytes_per_second,
                "emulated": True,
                "step_seconds": median_interval(seconds),
                "compute_seconds": layers["step_seconds"],
                "comm_seconds": sum(comm),
                "bound_seconds": bound,
                "fifo_bound_seconds": max(wfbp(*times), layers["step_seconds"]),
                "efficiency": bound / median(seconds),
                "speedup_vs_fifo": median(trained["seconds"]["fifo"]) / median(seconds),
            }
        )
    return rows


def _print(rows: list[Row], trained: Mapping[str, Any], directory: Path) -> None:
    fifo, scheduled = rows
    bound = scheduled["bound_seconds"]
    milliseconds = [
        ("FIFO order, as without a scheduler", fifo["step_seconds"]),
        ("with the scheduler", scheduled["step_seconds"]),
    ]
    print(f"\n{'':38}{'ms/step':>9}{'95 % interval':>16}{'T*/T':>7}")
    for name, seconds in milliseconds:
        low, middle, high = (1000 * seconds[key] for key in ("low", "median", "high"))
        print(f"{name:38}{middle:9.1f}{f'{low:.1f} to {high:.1f}':>16}{1000 * bound / middle:7.2f}")
    print(f"{'bound T*: no schedule can be faster':38}{1000 * bound:9.1f}")
    print(f"{'  (bound of FIFO order)':38}{1000 * fifo['fifo_bound_seconds']:9.1f}")
    compute, comm = 1000 * fifo["compute_seconds"], 1000 * fifo["comm_seconds"]
    print(
        f"\nspeed-up {scheduled['speedup_vs_fifo']:.2f}x; the most that is possible, FIFO/T*: "
        f"{fifo['step_seconds']['median'] / bound:.2f}x (compute {compute:.1f} ms, communication {comm:.1f} ms)"
        f"\ntest accuracy {trained['accuracy']:.1%}; weights on all workers are {'' if trained['equal'] else 'NOT '}equal"
        f"\ntimeline of all workers: {directory / 'trace.json'} (open it in https://ui.perfetto.dev or chrome://tracing)"
    )
