"""Ranks that are threads of the test, on a real control channel over loopback."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from commsched.control.client import ControlClient
from commsched.control.events import Listener
from commsched.control.messages import Member
from commsched.control.server import ControlServer
from commsched.core.errors import CommschedError
from commsched.net.rpc import DaemonExecutor

TOKEN = "the-secret-of-this-test"
PATIENCE_SECONDS = 60.0  # for what is to happen: only a failing test waits as long


class Recorder(Listener):
    """A listener that puts every call into a queue."""

    def __init__(self, steps: dict[int, int] | None = None) -> None:
        self.calls: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.steps = steps or {}

    def on_failure(self, error: CommschedError) -> None:
        self.calls.put(("failure", error))

    def on_leave(self, rank: int) -> None:
        self.calls.put(("leave", rank))

    def on_parting(self, rank: int, release: Callable[[], None]) -> None:
        self.calls.put(("parting", (rank, release)))

    def on_end(self) -> None:
        self.calls.put(("end", None))

    def on_message(self, rank: int, topic: str, value: Any) -> None:
        self.calls.put(("told", (rank, value)))

    def on_announced(self, topic: str, value: Any) -> None:
        self.calls.put(("announced", value))

    def hold_steps(self) -> dict[int, int]:
        self.calls.put(("hold", None))
        return self.steps

    def switch_at(self, config: dict[str, Any], steps: dict[int, int], window: dict[str, Any]) -> None:
        self.calls.put(("switch", (config, steps)))

    def next(self, kind: str) -> Any:
        """What the next call, of this kind, was given."""
        got, value = self.calls.get(timeout=PATIENCE_SECONDS)
        assert got == kind, (got, value)
        return value

    def failure(self) -> CommschedError:
        """The failure told, whatever was told before it."""
        while True:
            kind, value = self.calls.get(timeout=PATIENCE_SECONDS)
            if kind == "failure":
                return value


class Job:
    """A server, and the ranks that have joined it."""

    def __init__(
        self, world_size: int, fail_after_seconds: float, join_within_seconds: float, direct: bool, stack: ExitStack
    ) -> None:
        self.world_size = world_size
        self.direct = direct
        self.timing = {"fail_after_seconds": fail_after_seconds, "join_within_seconds": join_within_seconds}
        self.server = ControlServer("127.0.0.1:0", TOKEN, world_size, **self.timing, servers=4)
        self.listeners = [Recorder() for _ in range(world_size)]
        self.clients: list[ControlClient] = []
        self._stack = stack
        self._executor = DaemonExecutor("test")
        stack.callback(self._executor.shutdown)
        stack.callback(self.server.close)

    def join(self, member: Member, listener: Any = None, token: str = TOKEN, job: str = "") -> ControlClient:
        server = self.server if self.direct and member.is_rank and member.index == 0 else None
        client = ControlClient(self.server.address, token, member, **self.timing, server=server, job=job)
        client.listen(listener or Recorder())
        self._stack.callback(client.close)
        return client

    def join_rank(self, rank: int) -> ControlClient:
        return self.join(Member.rank(rank, self.world_size, f"host-{rank}"), self.listeners[rank])

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call in a thread of its own."""
        return self._executor.submit(function, *args)

    def on_all(self, function: Callable[[int], Any]) -> list[Any]:
        """Call with each rank, at once; what they return, in rank order."""
        return results([self.start(function, rank) for rank in range(self.world_size)])

    def leave(self) -> None:
        """End the job in good order."""

        def leave(rank: int) -> None:
            self.clients[rank].leave()
            self.clients[rank].wait_until_all_left()

        self.on_all(leave)


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE_SECONDS) for future in futures]


@contextmanager
def joining(
    world_size: int, *, fail_after_seconds: float = 10.0, join_within_seconds: float = 60.0, direct: bool = False
) -> Iterator[Job]:
    """A job that nobody has joined yet. ``direct``: rank 0 will use no socket, as in a session."""
    with ExitStack() as stack:
        yield Job(world_size, fail_after_seconds, join_within_seconds, direct, stack)


@contextmanager
def running(world_size: int, *, fail_after_seconds: float = 10.0, direct: bool = False) -> Iterator[Job]:
    """A job that all ranks have joined."""
    with joining(world_size, fail_after_seconds=fail_after_seconds, direct=direct) as job:
        job.clients = job.on_all(job.join_rank)
        yield job


def leftover_threads(before: set[threading.Thread]) -> list[str]:
    """Names of threads that were not there before. gRPC's own are given a moment: they are not ours to join."""
    new = set(threading.enumerate()) - before
    for thread in new:
        if not thread.name.startswith("commsched"):
            thread.join(PATIENCE_SECONDS)
    return [thread.name for thread in new if thread.is_alive()]
