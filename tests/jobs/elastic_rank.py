"""A rank of elastic jobs: trains a small numpy network, and prints the digest of its weights.

elastic_rank.py STEPS DIRECTORY [STRIKE ...]: each STRIKE is WHERE:WHO:STEP:HOW, done once in the job, as DIRECTORY notes.
WHERE: begin (of a process, and then STEP is the number of files in DIRECTORY), start, forward, backward, stepped or after (the
loop); left, and then rank and STEP are 0: the end of a process that
leaves; or a place in the opening of a generation (``openings.py``), and then STEP is the generation's number. WHO: a rank's
number, or s, k or l and the number of a rank that strikes the job's newest server, the server of the user's own whose process
number is KEPT_SERVER in the environment, or the launcher. HOW: kill, lost (kill, and hang), stop, term, raise,
exit, quit (exit with 0), or wait until there is a file DIRECTORY/STRIKE.go.
STEP_SECONDS in the environment makes each step longer, and KEEP is what the script keeps.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import commsched
from commsched.plugins.numpy import SGD, Linear, Network, ReLU, ScheduledOptimizer, softmax_cross_entropy
from commsched.session.elastic import ElasticStep
from commsched.session.session import Session
from tests.jobs import openings
from tests.jobs.rank import say


def server_of(launcher: int) -> int:
    """The process number of the job's newest server."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            command = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(words[1]) == launcher and words[0] != "Z" and b"server" in command:
            found.append(int(pid))
    return max(found)


class Strikes:
    def __init__(self, directory: str, strikes: list[str]) -> None:
        self._directory = Path(directory)
        self._strikes = strikes
        self.is_leaving: Callable[[], bool] = lambda: True

    def at(self, where: str, step: ElasticStep) -> None:
        if where == "start":
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        self.hit(where, step.rank, step.number)

    def hit(self, where: str, rank: int, step: int) -> None:
        for strike in self._strikes:
            place, who, number, how = strike.split(":")
            if (place, who.lstrip("skl"), int(number)) != (where, str(rank), step):
                continue
            try:
                (self._directory / strike).touch(exist_ok=False)
            except FileExistsError:
                continue
            say(1, f"strike {time.monotonic():.3f} {strike}")
            if how == "raise":
                raise ValueError("boom")
            if how in ("exit", "quit"):
                sys.exit(3 if how == "exit" else 0)
            while how == "wait" and not (self._directory / f"{strike}.go").exists():
                time.sleep(0.01)
            if how == "wait":
                continue
            targets = {"s": server_of, "k": lambda _: int(os.environ["KEPT_SERVER"]), "l": int}
            os.kill(
                targets[who[0]](os.getppid()) if who[0] in targets else os.getpid(),
                {"kill": signal.SIGKILL, "lost": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[how],
            )
            while how == "lost":
                time.sleep(1.0)  # like a machine without power, until it is killed
            while who.startswith("l") and not self.is_leaving():
                time.sleep(0.01)  # until the launcher has passed the signal on


def make_optimizer() -> SGD:
    rng = np.random.default_rng(0)
    layers = [Linear(32, 96, rng, np.float32), ReLU(), Linear(96, 96, rng, np.float32), ReLU(), Linear(96, 10, rng, np.float32)]
    return SGD(Network(layers), learning_rate=0.01, momentum=0.9)


def batch(step: int, rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
    data = np.random.default_rng((step, rank))
    return data.standard_normal((8, 32), np.float32), data.integers(0, 10, 8)


def digest(network: Network) -> str:
    weights = b"".join(value.tobytes() for layer in network.layers for value in layer.parameters.values())
    return hashlib.sha256(weights).hexdigest()


def train(steps: int, strikes: Strikes, session: Session | None = None) -> tuple[int, str]:
    """Return the rank at the end, and the digest of the weights with the number of ranks in each step."""
    base = make_optimizer()
    network = base.network
    optimizer = ScheduledOptimizer(base, session)
    elastic = commsched.Elastic(optimizer, keep=os.environ.get("KEEP", "device"))  # type: ignore[arg-type]
    strikes.is_leaving = lambda: elastic._leaves
    for step in elastic.steps(steps):
        with step:
            if step.is_new_world:
                say(1, f"rank {step.rank} of {step.world_size} pid {os.getpid()} step {step.number} at {time.monotonic():.3f}")
            strikes.at("start", step)
            inputs, labels = batch(step.number, step.rank)
            outputs = network.forward(inputs)
            strikes.at("forward", step)
            _, gradient = softmax_cross_entropy(outputs, labels)
            network.backward(gradient)
            strikes.at("backward", step)
            optimizer.step()
            strikes.at("stepped", step)
            elastic.state["shares"] = [*elastic.state.get("shares", []), [step.number, step.world_size]]
    strikes.at("after", ElasticStep(steps, elastic.session, False))
    shares = " ".join(f"{number}/{size}" for number, size in elastic.state["shares"])
    return elastic.session.rank, f"{digest(network)} shares {shares}"


def main() -> None:
    steps, directory, *given = sys.argv[1:]
    strikes = Strikes(directory, given)
    openings.watch(strikes.hit)
    strikes.hit("begin", int(os.environ["RANK"]), len(os.listdir(directory)))
    try:
        rank, end = train(int(steps), strikes)
    except SystemExit:
        say(1, f"left {os.getpid()}")
        strikes.hit("left", 0, 0)
        raise
    say(1, f"rank {rank} weights {end}")


if __name__ == "__main__":
    main()
