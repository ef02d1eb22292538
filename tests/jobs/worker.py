"""A rank of the tests' jobs: averages one tensor per step, checks every number, and misbehaves as told.

worker.py STEPS [--shape N] [--dtype NAME] [--tensors N] [--fail-at STEP] [--exit-at STEP] [--kill-at STEP]
          [--stall-at STEP] [--hold-at STEP] [--exit-code CODE] [--evaluate FILE] [--rank R] [--meet DIRECTORY]

The misbehaviour is that of rank ``--rank`` only, and not after torchrun has restarted the job. The others evaluate, after their
last step, until there is ``--evaluate``. With ``--meet`` each waits, before it joins, until all ranks have started: on a busy
machine processes start at very different times.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from array import array
from pathlib import Path

import commsched
from commsched.core.manifest import Manifest, TensorSpec
from tests.jobs.rank import run, say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--shape", type=int, default=1000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tensors", type=int, default=2)
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--exit-at", type=int, default=-1)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--stall-at", type=int, default=-1)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--exit-code", type=int)
    parser.add_argument("--evaluate", type=Path)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--meet", type=Path)
    args = parser.parse_args()

    if args.meet is not None:
        (args.meet / os.environ["COMMSCHED_RANK"]).touch()
        while len(os.listdir(args.meet)) < int(os.environ["COMMSCHED_WORLD_SIZE"]):
            time.sleep(0.02)  # other processes make them: nothing could tell us
    session = commsched.init()
    odd = session.rank == args.rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    shape = args.shape if odd else 1000
    dtype = args.dtype if odd else "float32"
    tensors = args.tensors if odd else 2
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (shape,), dtype) for i in range(tensors)))
    buffers = {dtype: bytearray(size) for dtype, size in manifest.buffer_bytes.items()}
    group = session.register(manifest, {dtype: memoryview(buffer) for dtype, buffer in buffers.items()})
    values = memoryview(buffers["float32"]).cast("f")
    say(1, f"rank {session.rank} of {session.world_size} pid {os.getpid()}")
    mean = (session.world_size - 1) / 2
    for step in range(args.steps):
        if odd and step == args.fail_at:
            raise ValueError("boom")
        if odd and step == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if odd and step == args.exit_at:
            sys.exit(args.exit_code)
        if odd and step == args.hold_at:
            ctypes.PyDLL(None).usleep(5_000_000)  # with the interpreter's lock, unlike what CDLL calls
        values[:] = array("f", [session.rank + step]) * len(values)
        group.begin_step()
        for tensor in reversed(range(tensors)):
            if odd and step == args.stall_at and tensor == 0:
                time.sleep(1000)  # it lives, and does not send
            group.notify_ready(tensor)
        for proxy in group.proxies:
            proxy.wait()
        if set(values) != {mean + step}:
            sys.exit(f"rank {session.rank} step {step}: wrong numbers")
        time.sleep(0.001)  # a step's computation
    while not odd and args.evaluate is not None and not args.evaluate.exists():
        time.sleep(0.02)
    say(1, f"rank {session.rank} finished")


if __name__ == "__main__":
    run(main)
