"""The elastic jobs of the soak: how each is made, and whom it loses where."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from tests.jobs.openings import PLACES

WHERE = ("start", "forward", "backward", "stepped")
#: Lost ranks are replaced; or the others go on without them; or they do so until the new processes have come.
LIMITS = ("wait", "shrink", "late")
#: There are more restarts than a job can lose processes: how many it uses up is another test's.
_RESTARTS = 20


@dataclass(frozen=True)
class Plan:
    """A job.

    Attributes:
        servers: of the launcher, for each generation anew; ``kept``: of the user's own. Without both, each rank has a shard.
        limit: one of ``LIMITS``.
        strikes: as ``elastic_rank.py`` takes them.
        hail: more strikes, from outside: the seconds after the one before, the number of a living process, a signal's name.
    """

    engine: str
    transport: str
    ranks: int
    steps: int
    machines: int
    servers: int
    kept: int
    limit: str
    keep: str
    standby: bool
    step_seconds: float
    strikes: tuple[str, ...]
    hail: tuple[tuple[float, int, str], ...] = ()

    @property
    def local(self) -> int:
        """The ranks for which each machine has room."""
        return -(-self.ranks // self.machines)

    def options(self) -> list[str]:
        """Those of ``commsched run``."""
        options = ["-n", str(self.ranks), "--fail-after", "2", "--elastic", "--transport", self.transport]
        options += ["--servers", str(self.servers)] if self.servers else []
        options += ["--local", str(self.local)] if self.machines > 1 else []
        options += ["--standby"] if self.standby else []
        # Each lost server takes a restart.
        restarts = sum(kind_of(strike).startswith("server") for strike in self.strikes) if self.limit == "shrink" else _RESTARTS
        options += ["--max-restarts", str(restarts)]
        options += ["--min", "1"] if self.limit != "wait" else []
        return options + (["--replace-within", "0.1"] if self.limit == "late" else [])

    def __str__(self) -> str:
        servers = (
            f", {self.servers or self.kept} servers{' of its own' if self.kept else ''}" if self.servers or self.kept else ""
        )
        machines = f" on {self.machines} machines" if self.machines > 1 else ""
        ways = {"wait": "", "shrink": ", none replaced", "late": ", replaced late"}
        keep = "" if self.keep == "device" else f", keep={self.keep}"
        return f"{self.engine}, {self.transport}, {self.ranks} ranks{machines}{servers}{ways[self.limit]}{keep}"

    def struck(self) -> str:
        return " ".join([*self.strikes, *(f"{seconds:.2f}s:{number}:{how}" for seconds, number, how in self.hail)])


def kind_of(strike: str) -> str:
    """The loss that ``strike`` is."""
    where, who, _, how = strike.split(":")
    kinds = {"kill": "killed", "lost": "killed", "stop": "frozen", "raise": "by an exception", "term": "by SIGTERM"}
    whom = {"l": "machine", "s": "server", "k": "server of its own"}.get(who[0], "rank")
    opening = f", while a generation opens ({where})" if where in PLACES else ""
    return f"{whom}, {kinds[how]}{opening}"


def draw(chance: random.Random, args: argparse.Namespace) -> Plan:
    engine, ranks, machines = chance.choice(args.engines), chance.choice(args.ranks), chance.choice(args.machines)
    transport = chance.choice(args.transports)
    separate = chance.choice(("", "servers", "kept")) if transport == "ps" and machines == 1 and args.servers else ""
    limit = chance.choices(LIMITS, (5, 3, 2))[0]
    servers, kept = chance.choice((1, 2)) if separate == "servers" else 0, 2 if separate == "kept" else 0
    how = chance.choices(("steps", "opening", "hail"), args.how)[0]
    strikes: list[str] = []
    hail: list[tuple[float, int, str]] = []
    if how == "hail":
        for _ in range(chance.randint(2, 4)):
            pause = chance.uniform(0.0, 1.5) + (2.5 if ranks == 2 else 0.0)  # else both are lost more often than not
            signals = ("KILL", "KILL", "TERM") if limit == "shrink" else ("KILL", "KILL", "STOP", "TERM")  # see _in_opening
            hail.append((pause, chance.randrange(ranks), chance.choice(signals)))
    else:
        count = chance.randint(1, 3) if how == "steps" and limit != "shrink" else 1
        for step in sorted(chance.sample(range(4, args.steps), count)):
            strikes.append(_in_step(chance, args, ranks, step, "s" if servers else "k" if kept else ""))
    if how == "opening":
        left = ranks - (limit == "shrink")
        for generation in range(2, 2 + chance.choice((1, 1, 2))):
            strikes.append(_in_opening(chance, max(1, left), generation, "s" if servers else "k" if kept else ""))
            left -= limit == "shrink"
    if how == "steps" and machines > 1 and limit == "wait" and chance.random() < 0.5:  # a machine that does not host the job
        where, _, step, _ = strikes[0].split(":")
        lost = chance.choice(("lost", "kill", "term"))
        strikes = [f"{where}:l{chance.randrange(-(-ranks // machines), ranks)}:{step}:{lost}"]
    # So that losses from outside come while the job trains, and new processes that are late find others that still train.
    step_seconds = 0.15 if how == "hail" or limit == "late" else args.step_seconds
    keep, standby = chance.choice(args.keep), args.standby or chance.random() < 0.15
    return Plan(
        *(engine, transport, ranks, args.steps, machines, servers, kept, limit, keep, standby, step_seconds),
        strikes=tuple(strikes),
        hail=tuple(hail),
    )


def _in_step(chance: random.Random, args: argparse.Namespace, ranks: int, step: int, server: str) -> str:
    who, how = str(chance.randrange(ranks)), chance.choice(("kill", "kill", "kill", "stop", "raise", "term"))
    if server and chance.random() < 0.4 and step < args.steps - 10:  # it must be missed before the loop ends
        who, how = f"{server}{who}", "kill"
    return f"{chance.choice(WHERE)}:{who}:{step}:{how}"


def _in_opening(chance: random.Random, ranks: int, generation: int, server: str) -> str:
    who, how = str(chance.randrange(ranks)), chance.choice(("kill", "kill", "kill", "stop", "term"))
    if ranks == 1 and how == "stop":  # nobody misses the only rank that is left, which goes on when somebody lets it
        how = "kill"
    if server and chance.random() < 0.4:
        who, how = f"{server}{who}", "kill"
    return f"{chance.choice(PLACES)}:{who}:{generation}:{how}"
