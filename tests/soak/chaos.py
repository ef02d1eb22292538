"""Jobs of random shape, each struck by a random fault at a random moment: exact training, or a named error in time."""

from __future__ import annotations

import argparse
import random
import signal
import time
from collections import Counter

from .jobs import CONFIGURATIONS, Struck, culprit, strike

STEPS = 1500
FAIL_AFTER = 2.0
KINDS = ("none", "pause", "sleep", "kill", "segv", "exception", "freeze", "kill server", "kill launcher", "SIGTERM", "SIGINT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no job after that long")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> bool:
    """Prints a line per job, then counts; whether all is as promised."""
    rng = random.Random(args.seed)
    counts: Counter[str] = Counter()
    reference: dict[int, str] = {}  # number of ranks -> weights
    failures = []
    until = time.monotonic() + args.seconds
    job_number = 0
    while time.monotonic() < until:
        job_number += 1
        name, ranks, kind = rng.choice(list(CONFIGURATIONS)), rng.randint(2, 4), rng.choice(KINDS)
        victim, moment, pause = rng.randrange(ranks), rng.uniform(0.0, 1.0), rng.uniform(0.1, 1.2)
        once_joined = rng.random() < 0.7
        if kind == "kill server" and "server" not in name:
            kind = "kill"
        outcome, why = _one(name, ranks, kind, victim, moment, pause, once_joined, reference)
        counts[f"{kind}: {outcome}"] += 1
        print(f"{job_number}: {name}, {ranks} ranks, {kind} of {victim}: {outcome} {why}", flush=True)
        if outcome == "FAILS":
            failures.append(job_number)
    print(f"\n{job_number} jobs with seed {args.seed}")
    for what, count in sorted(counts.items()):
        print(f"| {what} | {count} |")
    print(f"{len(failures)} failed: {failures}" if failures else "all as promised")
    return not failures


def _one(
    name: str,
    ranks: int,
    kind: str,
    victim: int,
    moment: float,
    pause: float,
    once_joined: bool,
    reference: dict[int, str],
) -> tuple[str, str]:
    """What became of one job, and why if it is not as promised."""
    inside = kind in ("sleep", "exception", "segv")
    arguments = [
        str(STEPS),
        *(("--fault", kind, "--at", str(int(20 + 1000 * moment)), "--rank", str(victim), "--seconds", "5") if inside else ()),
    ]
    with Struck(name, ranks, arguments, FAIL_AFTER) as job:
        if once_joined:
            job.wait_until_joined()
        struck = inside or kind == "none" or _strike(job, kind, victim, moment, pause)
        joined = dict(job.said.pids)
        code = job.wait_until_ended(60.0)
        left = job.left_over(range(ranks), 3.0)
        weights, raised = dict(job.said.weights), dict(job.said.raised)
    if code is None:
        return "FAILS", "the launcher did not end"
    if left:
        return "FAILS", f"processes {left} are left"
    if len(set(weights.values())) > 1:
        return "FAILS", f"weights differ: {weights}"
    wrong = next((text for text in raised.values() if _is_wrong(kind, victim, name, text)), None)
    if wrong is not None:
        return "FAILS", f"names another: {wrong}"
    if len(weights) == ranks and code == 0:
        if next(iter(weights.values())) != reference.setdefault(ranks, next(iter(weights.values()))):
            return "FAILS", "weights are others than those of other jobs of as many ranks"
        return ("exact" if struck else "exact (struck too late)"), ""
    if kind in ("none", "pause", "sleep"):
        return "FAILS", f"it ended with {code}: {raised}"
    culprits = sorted({culprit(text) or "?" for text in raised.values()})
    return "ended", f"(of {len(joined)} joined, {len(raised)} say why: {culprits})"


def _is_wrong(kind: str, victim: int, name: str, text: str) -> bool:
    if kind in ("kill", "segv", "exception", "freeze"):
        return culprit(text) not in (f"rank {victim}", None)
    return kind == "kill server" and not (culprit(text) or "server").startswith("server")


def _strike(job: Struck, kind: str, victim: int, moment: float, pause: float) -> bool:
    """Whether there was somebody to strike."""
    time.sleep(moment)
    match kind:
        case "kill launcher" | "SIGTERM" | "SIGINT":
            number = {"kill launcher": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}[kind]
            return strike(job.process.pid, number)
        case "kill server":
            servers = job.servers()
            return bool(servers) and strike(servers[victim % len(servers)], signal.SIGKILL)
    pid = job.said.pids.get(victim)
    if pid is None:
        return False
    if kind == "pause":
        stopped = strike(pid, signal.SIGSTOP)
        time.sleep(pause)
        return strike(pid, signal.SIGCONT) and stopped
    return strike(pid, signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
