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
            carried = [carrier.transport, opened.session.core.config.collective]
            found.append([*carried, opened.session is session, float(buffer.min()), float(buffer.max())])
    assert [opened.session.closed for opened in carriers.values()] == [False] + [True] * len(others)
    return found


def test_each_way_has_a_session_of_its_own():
    """Settings of the job that have no effect with a carrier are not for it."""
    carriers = [["ps"], ["gloo"], ["gloo", "static"], ["gloo", "auto", "rsag"]]
    found = run_job(Job(2, timeout_seconds=300, settings={"flows": "2"}), __name__, {"carriers": carriers}).by_rank
    collectives = ["all_reduce", "all_reduce", "all_reduce", "rsag"]
    assert found == [[[way[0], how, way == ["ps"], 0.5, 0.5] for way, how in zip(carriers, collectives)]] * 2
