"""Elastic jobs of random shape that lose ranks, servers and machines at random moments, also while a generation opens: the
weights, how soon training goes on, and what is left behind.

Weights are compared with those of the same batches without a loss, bit by bit. With fewer ranks, every rank must have the same
weights, and each step the batches of the ranks that took part in it; in numpy the same batches are computed anew as well.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from commsched.control.generations import HOLDERS_LOST, NONE_BEGUN, NONE_LEFT, NOTHING_KEPT
from commsched.session.elastic import Keep
from tests.jobs.job import ROOT, Job, clean_environ
from tests.jobs.kept import TOKEN, kept_server
from tests.jobs.machines import Machines, open_hosts

from .plans import Plan, draw, kind_of
from .running import MARK, Running, namespaces, processes_of, shared_memory, sockets_of, soon
from .undisturbed import replayed

#: The script of each engine; gpt2 is PyTorch with a model that takes its time.
RANKS = {
    engine: str(ROOT / "tests" / path)
    for engine, path in (
        ("numpy", "jobs/elastic_rank.py"),
        ("torch", "plugins/torch/elastic_rank.py"),
        ("gpt2", "plugins/torch/elastic_rank.py"),
    )
}

_NO_RESTART = "the ranks lost each other, and no restart is left"
#: Ends without weights that the docs announce.
ENDS = {
    HOLDERS_LOST: "all that had the values were lost",
    NONE_LEFT: "all ranks were lost",
    NONE_BEGUN: "no rank had begun",
    NOTHING_KEPT: "nothing was kept",
    "has failed after the last step": "a rank was lost after the last step",
    _NO_RESTART: "no restart was left",
}


@dataclass
class Result:
    """``outcome`` in a few words; ``why`` it is not as promised, if it is not."""

    outcome: str
    why: str = ""
    seconds: dict[str, float] = field(default_factory=dict)  # by strike, to the next step
    struck: Counter[str] = field(default_factory=Counter)  # the losses by kind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no job after that long (default: 10)")
    parser.add_argument("--jobs", type=int, metavar="N", help="begin no more jobs than that")
    parser.add_argument(
        "--seed", type=int, default=0, help="of all choices; job K of a seed is the same each time (default: 0)"
    )
    parser.add_argument("--first", type=int, default=1, metavar="K", help="begin with job K (default: 1)")
    engines_help = "default: numpy torch"
    parser.add_argument("--engines", nargs="+", default=["numpy", "torch"], choices=list(RANKS), help=engines_help)
    parser.add_argument("--transports", nargs="+", default=["ps", "gloo"], choices=["ps", "gloo"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4], metavar="N", help="ranks of a job (default: 2 3 4)")
    machines_help = "machines of a job, and one more as a spare if there are several (default: 1 1 1 2)"
    parser.add_argument("--machines", nargs="+", type=int, default=[1, 1, 1, 2], metavar="N", help=machines_help)
    parser.add_argument("--no-servers", dest="servers", action="store_false", help="every rank hosts a shard")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of each job (default: 40)")
    parser.add_argument("--step-seconds", type=float, default=0.0, metavar="SECONDS", help="least time of a step (default: 0)")
    how_help = "how often ranks are struck in a step, in the opening of a generation, from outside (default: 2 2 1)"
    parser.add_argument("--how", nargs=3, type=int, default=[2, 2, 1], metavar="N", help=how_help)
    keep_help = "what scripts keep (default: device cpu)"
    parser.add_argument("--keep", nargs="+", default=["device", "cpu"], choices=get_args(Keep), help=keep_help)
    parser.add_argument("--standby", action="store_true", help="always with a process on standby (default: now and then)")
    hangs_help = "time after which a job counts as hanging (default: 240)"
    parser.add_argument("--hangs-after", type=float, default=240.0, metavar="SECONDS", help=hangs_help)
    parser.add_argument("--torchrun", type=int, default=0, metavar="N", help="jobs of torchrun for comparison (default: none)")


def run(args: argparse.Namespace) -> bool:
    """Prints a row for each job, then counts; whether all is as promised."""
    print(f"seed {args.seed}\n\n| job | what | struck | seconds to the next step | |\n|---|---|---|---|---|", flush=True)
    before = namespaces(), shared_memory()
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)  # by engine and loss
    outcomes: Counter[str] = Counter()
    losses: Counter[str] = Counter()
    broken: list[int] = []
    until = time.monotonic() + 60 * args.minutes
    number = args.first
    while time.monotonic() < until and (args.jobs is None or number < args.first + args.jobs):
        plan = draw(random.Random(f"{args.seed} {number}"), args)
        result = one(plan, args, number)
        taken = ", ".join(f"{each:.1f}" for each in result.seconds.values())
        verdict = f"**{result.outcome}**: {result.why}" if result.why else result.outcome
        print(f"| {number} | {plan} | {plan.struck()} | {taken} | {verdict} |", flush=True)
        for strike, after in result.seconds.items():
            fewer = ", fewer ranks" if plan.limit == "shrink" else ""
            seconds[plan.engine, f"{kind_of(strike)}{fewer}{', with standby' if plan.standby else ''}"].append(after)
        outcomes[result.outcome] += 1
        losses += result.struck
        broken += [number] if result.why else []
        number += 1
    for each in range(args.torchrun):
        taken = restart("torch", args.ranks[0], args.steps, args.step_seconds, each)
        seconds["torchrun, torch", "a rank: all start anew, from nothing"] += taken.values()
    print("\n| engine | lost | median seconds to the next step | most | of |\n|---|---|---|---|---|")
    for (engine, kind), each in sorted(seconds.items()):
        print(f"| {engine} | {kind} | {statistics.median(each):.1f} | {max(each):.1f} | {len(each)} |")
    print("\n| loss | of |\n|---|---|")
    for kind, count in sorted(losses.items()):
        print(f"| {kind} | {count} |")
    print("\n| outcome | jobs |\n|---|---|")
    for outcome, count in sorted(outcomes.items()):
        print(f"| {outcome} | {count} |")
    now = namespaces(), shared_memory()
    left = [f"{len(after - its)} {what}" for what, its, after in zip(("namespaces", "shared memories"), before, now)]
    print(
        f"\n{number - args.first} jobs, seed {args.seed}; {losses.total()} losses; wrong weights: {outcomes['WRONG WEIGHTS']}; "
        f"hangs: {outcomes['HANG']}; leftovers: {outcomes['LEFTOVERS']}, {' and '.join(left)}; other failures: "
        f"{outcomes['FAILURE']}{f'; broken: {broken}' if broken else ''}"
    )
    return not broken and now[0] == before[0]


def one(plan: Plan, args: argparse.Namespace, number: int) -> Result:
    """Run a job to its end."""
    mark = f"{os.getpid()}-{args.seed}-{number}"
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="commsched-soak-"))
        temporary = os.path.join(directory, "tmp")
        os.mkdir(temporary)
        environ = {MARK: mark, "TMPDIR": temporary, "PYTHONFAULTHANDLER": "1"}
        environ |= {"STEP_SECONDS": str(plan.step_seconds), "KEEP": plan.keep, "MODEL": plan.engine}
        kept = [stack.enter_context(kept_server(COMMSCHED_FAIL_AFTER="2")) for _ in range(plan.kept)]
        if kept:
            servers = ",".join(address for _, address in kept)
            environ |= {"COMMSCHED_SERVERS": servers, "COMMSCHED_TOKEN": TOKEN, "KEPT_SERVER": str(kept[0][0].pid)}
        command = [sys.executable, RANKS[plan.engine], str(plan.steps), directory]
        if plan.machines == 1:
            jobs = [stack.enter_context(Job(*plan.options(), "--", *command, *plan.strikes, environ=environ, imports=()))]
        else:
            hosts = stack.enter_context(open_hosts(plan.machines + 1))
            machines = stack.enter_context(Machines(hosts, command, imports=()))
            jobs = [machines.launch(each, plan.options(), *plan.strikes, **environ) for each in range(plan.machines + 1)]
        running = Running(jobs, mark)
        hail = running.hail(plan.ranks, plan.hail)
        code = running.end(args.hangs_after)
        out, err = "".join(running.out), "".join(running.err)
        result = judge(plan, args, code, out, err)
        result.struck = Counter(kind_of(strike) for _, strike in struck_in(out)) + Counter(
            f"rank, by SIG{how} from outside" for how in hail
        )
        result.seconds = recoveries(out, plan.ranks)
        if not result.why and (left := leftovers(mark, temporary, [server.pid for server, _ in kept if server.poll() is None])):
            result.outcome, result.why = "LEFTOVERS", left
        if result.why:
            print(f"job {number}: it said:\n{out}\n{err}", flush=True)
            for pid in processes_of(mark):
                os.kill(pid, 9)
        return result


def leftovers(mark: str, temporary: str, servers: Sequence[int]) -> str:
    """The things that a job has left behind. Its ``servers`` live on, each with the socket at which it listens."""
    soon(lambda: not processes_of(mark))
    soon(lambda: all(sockets_of(pid) <= 1 for pid in servers))
    processes = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in processes_of(mark)]
    open_sockets = sum(max(0, sockets_of(pid) - 1) for pid in servers)
    files = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]  # a cache of PyTorch's
    found = {"processes": processes, "files": files, "sockets of servers": open_sockets}
    return "; ".join(f"{what}: {each}" for what, each in found.items() if each)


def struck_in(out: str) -> list[tuple[float, str]]:
    return [(float(at), strike) for at, strike in re.findall(r"^strike ([\d.]+) (\S+)$", out, re.MULTILINE)]


def recoveries(out: str, ranks: int) -> dict[str, float]:
    """By strike: the seconds to the first step after it of any rank that had to begin anew."""
    begun = sorted(float(each) for each in re.findall(r" at ([\d.]+)$", out, re.MULTILINE))[ranks:]  # not when all begin
    found: dict[str, float] = {}
    for at, strike in struck_in(out):
        if later := [begin for begin in begun if begin > at]:
            found[strike] = later[0] - at
    return found


def judge(plan: Plan, args: argparse.Namespace, code: int | None, out: str, err: str) -> Result:
    ends = re.findall(r"^rank (\d+) weights (\w+) shares (.*)$", out, re.MULTILINE)
    if code is None:
        return Result("HANG", f"it had not ended after {args.hangs_after:g} s")
    if code != 0:
        announced = next((end for text, end in ENDS.items() if text in err), "")
        is_used_up = plan.limit == "shrink" and announced == ENDS[_NO_RESTART]  # that for a lost server, by a rank
        may_end = plan.hail or plan.keep == "nothing" or announced == ENDS[HOLDERS_LOST] or is_used_up
        if announced and may_end and not (ends and len({digest for _, digest, _ in ends}) > 1):
            return Result(f"ended, since {announced}")
        return Result("FAILURE", f"exit code {code}: {err[-300:]}")
    sizes = [plan.ranks] * plan.steps
    for now, step in re.findall(r"the job goes on with (\d+) ranks?(?: instead of \d+)?, from step (\d+)$", err, re.MULTILINE):
        sizes[int(step) :] = [int(now)] * (plan.steps - int(step))
    shares = {each for _, _, each in ends}
    if sorted(int(rank) for rank, _, _ in ends) != list(range(sizes[-1])):
        return Result("FAILURE", f"ranks {[rank for rank, _, _ in ends]} ended, of {sizes[-1]}")
    if len({digest for _, digest, _ in ends}) != 1:
        return Result("WRONG WEIGHTS", f"ranks differ: {ends}")
    if shares != {" ".join(f"{step}/{size}" for step, size in enumerate(sizes))}:
        return Result("WRONG WEIGHTS", f"the batches of the steps are not {sizes}: {shares}")
    [digest] = {digest for _, digest, _ in ends}
    if set(sizes) == {plan.ranks}:
        expected = undisturbed(plan, args)
        return Result("exact") if digest == expected else Result("WRONG WEIGHTS", "they are others than without a loss")
    if plan.engine == "numpy" and plan.machines == 1:
        exact = digest == replayed(sizes)
        return Result("exact, with fewer ranks") if exact else Result("WRONG WEIGHTS", "they are not those of these batches")
    return Result("equal ranks and the right batches, with fewer ranks")


_undisturbed: dict[tuple[str, int, int, int, str], str] = {}


def undisturbed(plan: Plan, args: argparse.Namespace) -> str:
    """The digest of the weights without a loss: in numpy of plain training, in PyTorch of a job. On several machines the
    transport may first add up what the ranks of each have, which rounds in another way."""
    if plan.engine == "numpy" and plan.machines == 1:
        return replayed([plan.ranks] * plan.steps)
    key = plan.engine, plan.ranks, plan.steps, plan.machines, plan.transport if plan.machines > 1 else ""
    if key not in _undisturbed:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            command = [sys.executable, RANKS[plan.engine], str(plan.steps), directory]
            options = ["-n", str(plan.ranks)]
            if plan.machines == 1:
                jobs = [stack.enter_context(Job(*options, "--", *command, environ={"MODEL": plan.engine}, imports=()))]
            else:
                options += ["--elastic", "--local", str(plan.local), "--transport", plan.transport]
                machines = stack.enter_context(Machines(stack.enter_context(open_hosts(plan.machines)), command, imports=()))
                jobs = [machines.launch(each, options, MODEL=plan.engine) for each in range(plan.machines)]
            running = Running(jobs, "")
            code = running.end(args.hangs_after)
        digests = set(re.findall(r"^rank \d+ weights (\w+)", "".join(running.out), re.MULTILINE))
        if code != 0 or len(digests) != 1:
            raise SystemExit(f"the run without a loss failed: {''.join(running.err)}")
        [_undisturbed[key]] = digests
    return _undisturbed[key]


def restart(engine: str, ranks: int, steps: int, step_seconds: float, number: int) -> dict[str, float]:
    """Run a job of torchrun for comparison, which starts all ranks anew. Weights are lost, since no checkpoint is written.
    Return the seconds to the next step, by strike."""
    launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "1", "--master-port", "0"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    with tempfile.TemporaryDirectory() as directory:
        strike = f"forward:{number % ranks}:{steps // 2}:kill"
        script = [RANKS[engine], str(steps), directory, strike]
        command = [sys.executable, "-m", *launcher, *script]
        environ = clean_environ(STEP_SECONDS=str(step_seconds), MODEL=engine)
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=True)
    return recoveries(ended.stdout, ranks)
