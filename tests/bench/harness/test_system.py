"""Several sessions in the same processes, each with a carrier of its own."""

from __future__ import annotations

from contextlib import ExitStack

from bench.harness.averaging import average, register
from bench.harness.job import Job, run_job
from bench.harness.system import Carrier, open_carriers


def rank_main(session, arguments):
    """In each rank's process: the averages of each carrier's own session."""
    own, *others = (Carrier(*carrier) for carrier in arguments["carriers"])
    with ExitStack() as stack:
        carriers = open_carriers(session, own, [own, *others, own], stack)
        found = []
        for carrier, opened in carriers.items():
            buffer, group = register(opened.session, f"{carrier}", 4000)
            buffer[:] = opened.session.rank
            average(group)
            opened.barrier.wait()
            found.append([carrier.transport, opened.session is session, float(buffer.min()), float(buffer.max())])
    assert [opened.session.closed for opened in carriers.values()] == [False] + [True] * len(others)
    return found


def test_each_way_has_a_session_of_its_own():
    found = run_job(Job(2, timeout_seconds=300), __name__, {"carriers": [["ps"], ["gloo"], ["gloo", "static"]]}).by_rank
    assert found == [[["ps", True, 0.5, 0.5], ["gloo", False, 0.5, 0.5], ["gloo", False, 0.5, 0.5]]] * 2
