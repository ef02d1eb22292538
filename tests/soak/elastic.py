"""Elastic jobs: kills and freezes of ranks and servers at random moments; how soon training goes on, and with which weights."""

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
from collections import defaultdict
from typing import get_args

from commsched.control.generations import NOTHING_KEPT
from commsched.session.elastic import Keep
from tests.jobs.job import ROOT, clean_environ
from tests.jobs.machines import Machines, ends, open_hosts

RANKS = {
    engine: str(ROOT / "tests" / path)
    for engine, path in (("numpy", "jobs/elastic_rank.py"), ("torch", "plugins/torch/elastic_rank.py"))
}
WHERE = ("start", "forward", "backward", "stepped")


def run_one(engine: str, steps: int, launcher: list[str], strikes: list[str]) -> tuple[int, str, str]:
    """Run a job to its end. ``launcher``: the module that starts the ranks, with its options."""
    with tempfile.TemporaryDirectory() as directory:
        script = [RANKS[engine], str(steps), directory, *strikes]
        ended = subprocess.run(
            [sys.executable, "-m", *launcher, *script], env=clean_environ(), capture_output=True, text=True, timeout=600
        )
    return ended.returncode, ended.stdout, ended.stderr


def run_among(engine: str, steps: int, count: int, options: list[str], strikes: list[str]) -> tuple[int, str, str]:
    """Run a job on ``count`` machines to its end. The exit code is that of the first launcher, which hosts the job."""
    with tempfile.TemporaryDirectory() as directory, open_hosts(count) as hosts:
        with Machines(hosts, [sys.executable, RANKS[engine], str(steps), directory]) as machines:
            found = ends(*[machines.launch(machine, options, *strikes) for machine in range(count)])
    return found[0][0], "".join(out for _, out, _ in found), "".join(err for _, _, err in found)


def ends_of(out: str) -> dict[int, str]:
    return {int(rank): digest for rank, digest in re.findall(r"^rank (\d+) weights (\w+)", out, re.MULTILINE)}


def recoveries(out: str, ranks: int) -> dict[str, float]:
    """By strike: the seconds to the first step after it of any rank that had to begin anew."""
    begun = sorted(float(each) for each in re.findall(r" at ([\d.]+)$", out, re.MULTILINE))[ranks:]  # not when all begin
    found: dict[str, float] = {}
    for at, strike in re.findall(r"^strike ([\d.]+) (\S+)$", out, re.MULTILINE):
        if later := [begin for begin in begun if begin > float(at)]:
            found[strike] = later[0] - float(at)
    return found


def kind_of(strike: str, is_smaller: bool) -> str:
    _, who, _, how = strike.split(":")
    if how == "stop":
        return "frozen rank (of which 2 s are fail_after)"
    lost = "machine" if who.startswith("l") else "server" if who.startswith("s") else "rank 0" if who == "0" else "other rank"
    return f"{lost}, {'SIGTERM' if how == 'term' else 'lost'}{', one rank fewer' if is_smaller else ''}"


_given_up: list[int] = []  # jobs that have ended since nothing was kept
_seconds: dict[tuple[str, str], list[float]] = defaultdict(list)  # by engine and kind of strike


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", nargs="+", default=list(RANKS), choices=list(RANKS))
    parser.add_argument("--ranks", type=int, default=3, metavar="N", help="ranks of each job (default: 3)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of each job (default: 40)")
    parser.add_argument("--jobs", type=int, default=10, metavar="N", help="jobs of each engine (default: 10)")
    parser.add_argument("--torchrun", type=int, default=0, metavar="N", help="jobs of torchrun for comparison (default: none)")
    machines_help = "machines of each job, with one more as a spare (default: 1, without a spare)"
    parser.add_argument("--machines", type=int, default=1, metavar="N", help=machines_help)
    parser.add_argument("--step-seconds", default="0", metavar="SECONDS", help="least time of a step (default: 0)")
    parser.add_argument("--keep", default="device", choices=get_args(Keep), help="what scripts keep (default: device)")
    parser.add_argument("--standby", action="store_true", help="with a process on standby")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> bool:
    os.environ["STEP_SECONDS"], os.environ["KEEP"] = args.step_seconds, args.keep
    print("| engine | job | struck | seconds to the next step | |\n|---|---|---|---|---|", flush=True)
    well = [job(args, engine, number) for engine in args.engines for number in range(args.jobs)]
    if args.torchrun:
        well += [restart(args, number) for number in range(args.torchrun)]
    print("\n| engine | struck | median seconds to the next step | of |\n|---|---|---|---|")
    for (engine, kind), seconds in sorted(_seconds.items()):
        print(f"| {engine} | {kind} | {statistics.median(seconds):.1f} | {len(seconds)} |")
    if args.keep == "nothing":
        print(f"\n{len(_given_up)} of {len(well)} jobs ended, since nothing was kept")
    return all(well)


def restart(args: argparse.Namespace, number: int) -> bool:
    """For comparison: torchrun starts all ranks anew. Weights are lost, since no checkpoint is written."""
    strike = f"forward:{number % args.ranks}:{args.steps // 2}:kill"
    launcher = ["torch.distributed.run", "--nproc-per-node", str(args.ranks), "--max-restarts", "1", "--master-port", "0"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    code, out, err = run_one("torch", args.steps, launcher, [strike])
    for seconds in recoveries(out, args.ranks).values():
        _seconds["torchrun, torch", "a rank, lost: all start anew, from nothing"].append(seconds)
    if code != 0:
        print(f"torchrun failed: {err[-2000:]}", flush=True)
    return code == 0


_undisturbed: dict[tuple[str, int, int, int, str], str] = {}


def undisturbed(engine: str, args: argparse.Namespace, transport: str) -> str:
    """The digest of the weights without a loss. On several machines ``transport`` may first add up what the ranks of each have,
    which rounds in another way."""
    key = engine, args.ranks, args.steps, args.machines, transport if args.machines > 1 else ""
    if key not in _undisturbed:
        options = ["-n", str(args.ranks)]
        if args.machines == 1:
            code, out, err = run_one(engine, args.steps, ["commsched", "run", *options, "--", sys.executable], [])
        else:
            options += ["--elastic", "--local", str(-(-args.ranks // args.machines)), "--transport", transport]
            code, out, err = run_among(engine, args.steps, args.machines, options, [])
        digests = set(ends_of(out).values())
        if code != 0 or len(digests) != 1:
            raise SystemExit(f"the run without a loss failed: {err}")
        [_undisturbed[key]] = digests
    return _undisturbed[key]


def job(args: argparse.Namespace, engine: str, number: int) -> bool:
    chance = random.Random(f"{args.seed} {engine} {number}")
    shrinks, servers = chance.random() < 0.3, chance.choice((0, 0, 1, 2)) if args.machines == 1 else 0
    local = -(-args.ranks // args.machines)
    transport = "ps" if servers else chance.choice(("ps", "gloo"))
    count = 1 if shrinks else chance.randint(1, 3)
    strikes = []
    for step in sorted(chance.sample(range(4, args.steps), count)):
        how = chance.choice(("kill", "kill", "kill", "stop", "raise", "term"))
        who = str(chance.randrange(args.ranks))
        if servers and chance.random() < 0.3 and step < args.steps - 10:  # it must be missed before the loop ends
            who, how = f"s{who}", "kill"
        strikes.append(f"{chance.choice(WHERE)}:{who}:{step}:{how}")
    if args.machines > 1 and not shrinks and chance.random() < 0.5:  # a machine that does not host the job
        where, _, step, _ = strikes[0].split(":")
        strikes[1:] = []
        strikes[0] = f"{where}:l{chance.randrange(local, args.ranks)}:{step}:{chance.choice(('lost', 'kill', 'term'))}"
    fewer = ["--min", str(args.ranks - 1), "--max-restarts", "1" if strikes[0].split(":")[1].startswith("s") else "0"]
    limits = fewer if shrinks else ["--max-restarts", str(count * local)]
    options = ["-n", str(args.ranks), "--servers", str(servers), "--fail-after", "2", "--elastic", *limits]
    options += ["--transport", transport, *(["--standby"] if args.standby else [])]
    expected = undisturbed(engine, args, transport)
    began = time.monotonic()
    if args.machines == 1:
        code, out, err = run_one(engine, args.steps, ["commsched", "run", *options, "--", sys.executable], strikes)
    else:
        options += ["--local", str(local)]
        code, out, err = run_among(engine, args.steps, args.machines + 1, options, strikes)
    digests = ends_of(out)
    is_smaller = "instead of" in err
    why, well = "", "ok"
    if args.keep == "nothing" and code != 0 and NOTHING_KEPT in err and not digests:
        well = "ended, since nothing was kept"
        _given_up.append(number)
    elif code != 0:
        why = f"exit code {code}: {err[-600:]}"
    elif len(set(digests.values())) != 1 or len(digests) != args.ranks - is_smaller:
        why = f"ranks differ: {digests}"
    elif not is_smaller and set(digests.values()) != {expected}:
        why = "weights are others than without a loss"
    found = recoveries(out, args.ranks)
    for strike, seconds in found.items():
        _seconds[engine, kind_of(strike, is_smaller)].append(seconds)
    where = f"{args.ranks} ranks on {args.machines} machine{'' if args.machines == 1 else 's'}"
    what = f"{transport}, {where}, {servers} servers{', then one fewer' if is_smaller else ''}"
    print(
        f"| {engine} | {what} | {' '.join(strikes)} | {', '.join(f'{each:.1f}' for each in found.values())} | {why or well} |",
        flush=True,
    )
    if why:
        print(f"took {time.monotonic() - began:.1f} s; it said:\n{out}\n{err}", flush=True)
    return not why
