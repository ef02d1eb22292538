"""One fault at a time in the middle of training, for each configuration: who is named, how soon, and what is left."""

from __future__ import annotations

import argparse
import itertools
import signal
import time
from dataclasses import dataclass

from .jobs import CONFIGURATIONS, Struck, culprit, strike

AT_STEP = 30
FOR_EVER = 1_000_000

#: Faults that end the job, and what happens: a signal from outside, or what the rank does to itself.
ENDING = {
    "kill -9": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "SIGTERM": signal.SIGTERM,
    "exception": None,
    "sys.exit(1)": None,
    "os._exit(1)": None,
    "segv": None,
}
#: Faults that no job may take notice of, but for its time.
HARMLESS = ("none", "pause", "sleep", "hold the GIL")


@dataclass
class Result:
    """``holds``: all is as promised; ``named``: survivors that name the culprit, of ``survivors``."""

    configuration: str
    fault: str
    victim: str
    holds: bool
    seconds: float
    named: int
    survivors: int
    why: str = ""
    weights: str | None = None

    def row(self) -> str:
        verdict = "ok" if self.holds else f"FAILS: {self.why}"
        return (
            f"| {self.configuration} | {self.fault} | {self.victim} | {self.seconds:.2f} | {self.named}/{self.survivors} | "
            f"{verdict} |"
        )


HEADER = "| configuration | fault | victim | seconds to the end of the last survivor | named | |\n|---|---|---|---|---|---|"


def struck(configuration: str, ranks: int, fault: str, victim: str, fail_after: float) -> Result:
    """A fault that ends the job. ``victim``: "rank 1", "server 0"."""
    kind, index = victim.split()
    own = ENDING[fault] is None
    arguments = [str(FOR_EVER), "--at", str(AT_STEP), "--rank", index, *(("--fault", fault) if own else ())]
    with Struck(configuration, ranks, arguments, fail_after) as job:
        awaited = [int(index)] if own else range(ranks)
        if not (job.wait_until_joined() and all(job.wait_until_reached(rank) for rank in awaited)):
            return Result(configuration, fault, victim, False, 0, 0, 0, f"it did not start: {job.errors[-300:]}")
        survivors = [rank for rank in range(ranks) if victim != f"rank {rank}"]
        began = time.monotonic()
        if not own:
            pid = job.said.pids[int(index)] if kind == "rank" else job.servers()[int(index)]
            strike(pid, ENDING[fault] or 0)
        # A second is so that the cause ends first; and the end of a process takes a core for some 0.1 s.
        limit = (fail_after if fault == "freeze" else 0.0) + 5.0 + 0.2 * ranks
        left = job.left_over(survivors, limit)
        seconds = time.monotonic() - began
        code = job.wait_until_ended(15.0)
        named = [rank for rank in survivors if culprit(job.said.raised.get(rank, "")) == victim]
        blamed = {rank: text for rank, text in job.said.raised.items() if rank in survivors and rank not in named}
    # mpiexec kills the others before they can say anything.
    may_be_silent = configuration == "mpi" and fault not in ("exception", "sys.exit(1)", "freeze")
    why = ""
    if left:
        why = f"ranks {left} still ran after {limit:g} s"
    elif code is None:
        why = "the launcher did not end"
    elif code == 0:
        why = "the launcher ended with 0"
    elif blamed and any(culprit(text) for text in blamed.values()):
        why = f"others are named: {blamed}"
    elif len(named) < len(survivors) and not may_be_silent:
        why = f"only ranks {named} name it; raised: {job.said.raised}; {job.errors[-300:]}"
    return Result(configuration, fault, victim, not why, seconds, len(named), len(survivors), why)


def harmless(configuration: str, ranks: int, fault: str, victim: int, fail_after: float, expected: str | None) -> Result:
    """A fault that training survives, with the weights ``expected`` (None: any, equal on all ranks)."""
    own = fault in ("sleep", "hold the GIL")
    arguments = ["200", "--at", str(AT_STEP), "--rank", str(victim)]
    arguments += ["--fault", fault, "--seconds", str(2.5 * fail_after)] if own else []
    with Struck(configuration, ranks, arguments, fail_after) as job:
        began = time.monotonic()
        if fault == "pause" and job.wait_until_reached(victim):
            strike(job.said.pids[victim], signal.SIGSTOP)
            time.sleep(0.6 * fail_after)
            strike(job.said.pids[victim], signal.SIGCONT)
        code = job.wait_until_ended(120.0)
        seconds = time.monotonic() - began
        weights = job.said.weights
    why = ""
    if code != 0:
        why = f"exit code {code}; raised: {job.said.raised}; {job.errors[-300:]}"
    elif len(set(weights.values())) != 1 or len(weights) != ranks:
        why = f"weights differ: {weights}"
    elif expected is not None and set(weights.values()) != {expected}:
        why = "weights are others than without the fault"
    return Result(configuration, fault, f"rank {victim}", not why, seconds, 0, 0, why, weights.get(0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=list(CONFIGURATIONS))
    parser.add_argument("--faults", nargs="+", default=[*ENDING, *HARMLESS], choices=[*ENDING, *HARMLESS])
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks of each job (default: 4)")
    parser.add_argument("--fail-after", type=float, default=2.0, metavar="SECONDS")


def run(args: argparse.Namespace) -> bool:
    """All of them, a row each; whether all is as promised."""
    print(HEADER, flush=True)
    holds = True
    expected: str | None = None
    for configuration in args.configurations:
        victims = ["rank 0", "rank 1", *(["server 0"] if "server" in configuration else [])]
        for fault, victim in itertools.product([fault for fault in args.faults if fault in ENDING], victims):
            if victim.startswith("server") and ENDING[fault] is None:
                continue
            result = struck(configuration, args.ranks, fault, victim, args.fail_after)
            print(result.row(), flush=True)
            holds &= result.holds
        for fault, rank in itertools.product([fault for fault in args.faults if fault in HARMLESS], (0, 1)):
            if fault == "none" and rank == 1:
                continue
            result = harmless(configuration, args.ranks, fault, rank, args.fail_after, expected)
            print(result.row(), flush=True)
            holds &= result.holds
            expected = expected or result.weights
    return holds
