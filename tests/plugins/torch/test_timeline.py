"""The timeline of a training, by the rules of the format that viewers read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from commsched.core.scheduler import SchedulerConfig
from commsched.plugins.torch import ScheduledOptimizer
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.session.trace import TraceObserver, merge
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world
from tests.plugins.torch.loops.loop import Data, mlp, sgd, train
from tests.session.trace_format import read_trace

STEPS = 4
Event = dict[str, Any]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    directory = tmp_path_factory.mktemp("trace")

    def main(rank: int) -> None:
        session: Session = sessions[rank]
        session.observer = TraceObserver(directory, rank)
        session.observe(session.observer)
        with session:
            train(
                Data([rank], session), models[rank], ScheduledOptimizer(sgd(models[rank]), models[rank], session=session), STEPS
            )

    models = [mlp() for _ in range(2)]
    sessions = local_sessions(
        2, SchedulerConfig(200, 400), wrap_transport=lambda transport: Delayed(transport, transport.rank, 0.001)
    )
    run_world(2, main, timeout_seconds=60)
    return read_trace(merge(directory))


def test_each_rank_has_steps_and_every_kind_of_bar(events: list[Event]) -> None:
    for rank in range(2):
        kinds = Counter(event["cat"] for event in events if event["ph"] == "X" and event["pid"] == rank)
        assert kinds["step"] == STEPS
        assert all(kinds[kind] > 0 for kind in ("forward", "backward", "update", "queue", "send", "reply"))
        assert kinds["queue"] == kinds["send"] == kinds["reply"]


def test_an_arrow_leads_from_a_gradient_by_its_messages_to_the_forward_that_needs_its_average(events: list[Event]) -> None:
    bars = [event for event in events if event["ph"] == "X" and event["pid"] == 0]

    def around(point: Event) -> str:
        [bar] = (bar for bar in bars if bar["tid"] == point["tid"] and bar["ts"] <= point["ts"] < bar["ts"] + bar["dur"])
        return str(bar["cat"])

    arrows: dict[str, list[str]] = {}
    for point in events:
        if point["ph"] in "stf" and point["pid"] == 0:
            arrows.setdefault(point["id"], []).append(around(point))
    ways = Counter(map(tuple, arrows.values()))
    assert ways["backward", "queue", "send", "reply", "forward"] > 0, ways
