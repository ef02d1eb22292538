"""Values that are averaged or broadcast once, in each step of a long job: nothing is kept of them."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise

import pytest

from commsched import Session
from commsched.control.end import ControlEnd
from commsched.core.errors import CommschedError
from commsched.core.interfaces import Transport
from commsched.core.manifest import TensorSpec
from commsched.session.local import local_sessions
from commsched.testing.checked_world import OpenWorld
from commsched.testing.world import run_world
from tests.transports.hierarchy.worlds import LocalNetwork, OrderedNetwork, hierarchy
from tests.transports.worlds import embedded_world, gloo_world, separate_world

CALLS = 60

WORLDS: dict[str, tuple[OpenWorld, int]] = {
    "shards": (embedded_world, 2),
    "flows": (partial(separate_world, flows=3, servers=1), 2),
    "gloo": (gloo_world, 2),
    "hosts": (hierarchy(lambda rank: rank // 2, LocalNetwork), 3),
    "hosts with collectives": (hierarchy(lambda rank: rank // 2, OrderedNetwork), 3),
}


class _Opened:
    """Transports for sessions: a failure of one is reported by the control end of its rank."""

    def __init__(self, open_world: OpenWorld, size: int) -> None:
        self._reports: list[Callable[[CommschedError], None]] = [lambda error: None] * size
        self._world: AbstractContextManager[Sequence[Transport]] = open_world(
            [lambda error, rank=rank: self._reports[rank](error) for rank in range(size)]
        )
        self._transports = self._world.__enter__()

    def transport(self, rank: int, control: ControlEnd) -> Transport:
        self._reports[rank] = control.report
        return self._transports[rank]

    def close(self) -> None:
        self._world.__exit__(None, None, None)


def held() -> int:
    """The number of all objects and of what is in all containers. Memory that is kept for new objects does not count."""
    gc.collect()
    objects, kinds = gc.get_objects(), (dict, list, set, deque)
    untracked = [each for of in objects for each in gc.get_referents(of) if type(each) in kinds and not gc.is_tracked(each)]
    return len(objects) + sum(len(each) for each in (*objects, *untracked) if type(each) in kinds)


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_averaged_once_leaves_nothing_behind(name: str) -> None:
    open_world, size = WORLDS[name]
    together = threading.Barrier(size)

    def average(session: Session, call: int) -> None:
        data = memoryview(bytearray(8))
        data.cast("f")[0] = call + session.rank
        session.average(TensorSpec(f"the loss of step {call}", (2,), "float32"), data)
        assert data.cast("f")[0] == call + (size - 1) / 2
        once = memoryview(bytearray([call % 256] if session.rank == 1 else [7]))
        session.broadcast(f"the word of step {call}", once, root=1)
        assert once[0] == call % 256

    def main(rank: int) -> int:
        with sessions[rank] as session:
            counts = []
            for call in range(3 * CALLS):
                average(session, call)
                if call % CALLS == CALLS - 1:
                    together.wait(30)
                    counts.append(held() if rank == 0 else 0)
                    together.wait(30)
            # A leak leaves something behind each time. Some other thread may load a module or a source file, but only once.
            return min(after - before for before, after in pairwise(counts))

    opened = _Opened(open_world, size)
    sessions = local_sessions(size, open_transport=opened.transport)
    try:
        growth = run_world(size, main, timeout_seconds=60)[0]
    finally:
        for session in sessions:
            session.abort("the test is over")
        opened.close()
    assert growth < CALLS, f"{CALLS} averages and {CALLS} broadcasts left {growth} objects behind"
