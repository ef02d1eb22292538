"""The ends of elastic jobs whose ranks run ``elastic_rank.py``."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from commsched.session.local import local_sessions
from commsched.session.session import Session

from .elastic_rank import Strikes, train
from .job import ROOT, gone

RANK = str(ROOT / "tests" / "jobs" / "elastic_rank.py")
STEPS = 8


def ended(out: str) -> dict[int, str]:
    """By rank: the digest of its weights, and the number of ranks in each step."""
    return {int(rank): end for rank, end in re.findall(r"^rank (\d) weights (.*)$", out, re.MULTILINE)}


def nothing_left(out: str) -> bool:
    return all(gone(int(pid)) for pid in re.findall(r" pid (\d+) ", out))


def undisturbed_end() -> str:
    """The end of two ranks without a loss: threads, in an ordinary job."""
    sessions = local_sessions(2)
    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(train, STEPS, Strikes("", []), session) for session in sessions]
        [end] = {each.result(60.0)[1] for each in ends}
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Session.close, sessions))
    return end
