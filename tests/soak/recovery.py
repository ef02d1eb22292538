"""How soon an elastic job trains again after each kind of loss, and how soon torchrun's restart does.

Each job loses the same processes at the same steps, one after the other, and its weights are compared as those of the soak are
(``elastic.py``). The seconds are those from the loss to the first step that begins after it, on any rank.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

from .elastic import RANKS, one, restart
from .plans import Plan

STEPS = 36
#: The least time of a step: a process on standby is ready again before the next loss.
STEP_SECONDS = 0.3

#: The ranks, servers, limit and strikes of each way.
WAYS: dict[str, tuple[int, int, str, tuple[str, ...]]] = {
    "replaced": (2, 0, "wait", ("forward:1:8:kill", "forward:0:18:kill", "forward:1:28:stop")),
    "one fewer": (3, 0, "shrink", ("forward:2:8:kill", "forward:0:18:kill")),
    "new server": (2, 1, "wait", ("forward:s1:8:kill", "forward:s0:18:kill")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", nargs="+", default=["numpy", "gpt2"], choices=list(RANKS), help="default: numpy gpt2")
    parser.add_argument("--transports", nargs="+", default=["ps", "gloo"], choices=["ps", "gloo"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="default: all")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="jobs of each kind (default: 1)")
    parser.add_argument("--torchrun", type=int, default=0, metavar="N", help="jobs of torchrun for comparison (default: none)")
    hangs_help = "time after which a job counts as hanging (default: 240)"
    parser.add_argument("--hangs-after", type=float, default=240.0, metavar="SECONDS", help=hangs_help)
    parser.set_defaults(seed=0, step_seconds=STEP_SECONDS)


def plans(engine: str, args: argparse.Namespace) -> list[Plan]:
    found = []
    for transport in args.transports:
        for way in args.ways:
            ranks, servers, limit, strikes = WAYS[way]
            for standby in (False, True) if way == "replaced" else (False,):
                if not servers or transport == "ps":
                    plan = Plan(engine, transport, ranks, STEPS, 1, servers, 0, limit, "device", standby, STEP_SECONDS, strikes)
                    found.append(plan)
    return found


def name_of(plan: Plan, strike: str) -> str:
    """It says what was lost, and how the job goes on."""
    _, who, _, how = strike.split(":")
    lost = "a server" if who.startswith("s") else "rank 0" if who == "0" else "another rank"
    then = "one fewer" if plan.limit == "shrink" else "replaced"
    return f"{lost}{' frozen, fail_after=2' if how == 'stop' else ' killed'}, {then}{', --standby' if plan.standby else ''}"


def run(args: argparse.Namespace) -> bool:
    """Prints the seconds of each job, then a row for each loss; whether all weights are right and nothing is left behind."""
    seconds: dict[tuple[str, str, str], list[float]] = defaultdict(list)  # by engine, transport and loss
    broken = []

    def note(what: str, engine: str, transport: str, taken: list[tuple[str, float]]) -> None:
        print(f"{what}: {'; '.join(f'{name}: {each:.1f}' for name, each in taken)}", flush=True)
        for name, each in taken:
            seconds[engine, transport, name].append(each)

    for engine in args.engines:
        for number in range(0 if engine == "numpy" else args.torchrun):
            taken_by_all = list(restart(engine, 2, STEPS // 2, STEP_SECONDS, number).values())
            note(engine, engine, "", [("a rank killed, torchrun starts all anew, from nothing", each) for each in taken_by_all])
            if len(taken_by_all) != 1:
                broken.append(f"{engine}, torchrun: {len(taken_by_all)} recoveries from one loss")
        for number in range(args.times):
            for plan in plans(engine, args):
                result = one(plan, args, number)
                broken += [f"{plan}: {result.outcome}: {result.why}"] if result.why else []
                taken = [(name_of(plan, strike), each) for strike, each in result.seconds.items()]
                note(f"{plan}: {result.outcome}", engine, plan.transport, taken)
    print("\n| engine | transport | lost | median seconds to the next step | most | of |\n|---|---|---|---|---|---|")
    for names, each in seconds.items():
        print(f"| {' | '.join(names)} | {statistics.median(each):.1f} | {max(each):.1f} | {len(each)} |")
    print("\n".join(["", *(broken or ["all weights are right, and nothing is left behind"])]))
    return not broken
