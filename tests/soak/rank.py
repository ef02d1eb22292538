"""A rank of the soak's jobs: trains a small numpy network, shows its weights, and misbehaves as it is asked to.

rank.py STEPS [--fault KIND --rank R --at STEP --seconds S]

Each line of output begins with the rank: "0 pid 4242", "0 reached 30", "0 weights 1a2b", "0 raised PeerLost: ...".
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import signal
import sys
import time

import numpy as np

import commsched
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy


def say(rank: int, line: str) -> None:
    """One write, so that the lines of several ranks do not mix."""
    os.write(1, f"\n{rank} {line}\n".encode())


def misbehave(kind: str, seconds: float) -> None:
    """What this rank does to itself; other faults come from outside."""
    match kind:
        case "exception":
            raise ValueError("boom")
        case "sys.exit(1)":
            sys.exit(1)
        case "os._exit(1)":
            os._exit(1)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "sleep":
            time.sleep(seconds)
        case "hold the GIL":
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL, unlike CDLL, keeps the interpreter's lock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=160)
    args = parser.parse_args()

    session = commsched.init()
    rank = session.rank
    say(rank, f"pid {os.getpid()}")
    rng = np.random.default_rng(0)
    layers = [Linear(64, args.width, rng, np.float32), ReLU(), Linear(args.width, 10, rng, np.float32)]
    network = Network(layers)
    optimizer = ScheduledOptimizer(SGD(network, learning_rate=0.001, momentum=0.9))
    data = np.random.default_rng(1 + rank)
    for step in range(args.steps):
        if step == args.at:
            say(rank, f"reached {step}")
            if rank == args.rank:
                misbehave(args.fault, args.seconds)
        labels = data.integers(0, 10, 8)
        _, gradient = softmax_cross_entropy(network.forward(data.standard_normal((8, 64), np.float32)), labels)
        network.backward(gradient)
        optimizer.step()
    optimizer.synchronize()
    weights = b"".join(value.tobytes() for layer in network.layers for value in layer.parameters.values())
    say(rank, f"weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    try:
        main()
    except commsched.CommschedError as error:
        where = os.environ.get("RANK") or os.environ.get("PMI_RANK") or "?"
        os.write(1, f"\n{where} raised {type(error).__name__}: {error}\n".encode().replace(b"\n", b" ").strip() + b"\n")
        sys.exit(1)
