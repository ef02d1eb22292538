"""Several sessions in the same processes, each with a way of its own."""

from __future__ import annotations

from contextlib import ExitStack

from bench.harness.averaging import average, register
from bench.harness.job import Job, run_job
from bench.harness.system import Way, open_ways


def rank_main(session, arguments):
    """In each rank's process: the averages of each way's own session."""
    own, *others = (Way(*way) for way in arguments["ways"])
    with ExitStack() as stack:
        ways = open_ways(session, own, [own, *others, own], stack)
        found = []
        for way, opened in ways.items():
            buffer, group = register(opened.session, f"{way}", 4000)
            buffer[:] = opened.session.rank
            average(group)
            opened.line.meet()
            found.append([way.transport, opened.session is session, float(buffer.min()), float(buffer.max())])
    assert [opened.session.closed for opened in ways.values()] == [False] + [True] * len(others)
    return found


def test_each_way_has_a_session_of_its_own():
    found = run_job(Job(2, timeout_seconds=50), __name__, {"ways": [["ps"], ["gloo"], ["gloo", "static"]]}).by_rank
    assert found == [[["ps", True, 0.5, 0.5], ["gloo", False, 0.5, 0.5], ["gloo", False, 0.5, 0.5]]] * 2
