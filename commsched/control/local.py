"""The control channel of ranks that are threads of one process. It behaves like ``client.py``, without a network."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..core.errors import ClosedError, CommschedError, PeerLost, TransportError, UnsupportedError
from .events import CallbackThread, Listener
from .roster import first_common_steps


class LocalControlWorld:
    """The control channel's shared state of the ranks of one process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()  # guards all below
        self.members: dict[int, LocalControl] = {}
        self.gathered: dict[str, dict[int, Any]] = {}
        self.left: set[int] = set()
        self.failure: CommschedError | None = None
        self.proposals: deque[str] = deque()
        self.promises: dict[int, dict[int, int] | None] | None = None  # answers to the current proposal, by rank

    def join(self, rank: int, listener: Listener) -> LocalControl:
        with self.changed:
            self.members[rank] = LocalControl(self, rank, listener)
            return self.members[rank]

    # --- called with ``changed`` held ---

    def check(self, rank: int) -> None:
        if self.failure is not None:
            raise self.failure
        if rank not in self.members:
            raise ClosedError("the control channel is closed")

    def ask(self) -> None:
        """Take up the next proposal, unless one is being handled."""
        if self.promises is None and self.proposals:
            asked = [member for rank, member in self.members.items() if rank not in self.left]
            self.promises = {member.rank: None for member in asked}
            for member in asked:
                member.call(member.answer_hold)

    def answer(self, rank: int, steps: dict[int, int]) -> None:
        assert self.promises is not None
        self.promises[rank] = steps
        promised = [steps for steps in self.promises.values() if steps is not None]
        if len(promised) < len(self.promises):
            return
        asked, self.promises = list(self.promises), None
        config, common = self.proposals.popleft(), first_common_steps(promised)
        for rank in asked:
            if rank in self.members:
                self.members[rank].call(lambda listener: listener.switch_at(json.loads(config), common))
        self.ask()


class LocalControl:
    """One rank's end of a :class:`LocalControlWorld`. Its listener is called in a thread of its own, except for a failure."""

    clock_offset_seconds = 0.0

    def __init__(self, world: LocalControlWorld, rank: int, listener: Listener) -> None:
        self.rank = rank
        self.listener = listener
        self._world = world
        self._callbacks = CallbackThread(self._raised)
        self._started = False

    def gather(self, tag: str, value: Any) -> list[Any]:
        world = self._world
        with world.changed:
            world.check(self.rank)
            values = world.gathered.setdefault(tag, {})
            values[self.rank] = json.loads(json.dumps(value))  # as it would arrive over the network
            world.changed.notify_all()
            while len(values) < world.world_size:
                # Not once all values are there: a rank that then raises because of the values must raise its own error.
                world.check(self.rank)
                gone = world.left - values.keys()
                if gone:
                    raise PeerLost(f"rank {min(gone)} left; '{tag}' waits for it")
                world.changed.wait()
            return [values[rank] for rank in range(world.world_size)]

    def report(self, error: CommschedError) -> None:
        with self._world.changed:
            if self._world.failure is not None:
                return
            self._world.failure = error
            self._world.changed.notify_all()
            members = list(self._world.members.values())
        for member in members:
            member.listener.on_failure(error)

    def propose(self, config: dict[str, Any]) -> None:
        with self._world.changed:
            self._world.check(self.rank)
            self._world.proposals.append(json.dumps(config))
            self._world.ask()

    def send_to_rank_0(self, value: Any) -> None:
        if self.rank == 0:
            raise UnsupportedError("rank 0 cannot send to itself")
        text = json.dumps(value)
        with self._world.changed:
            self._world.check(self.rank)
            if self.rank in self._world.left:
                raise ClosedError(f"rank {self.rank} has left and cannot send to rank 0")
            if 0 in self._world.members:
                self._world.members[0].call(lambda listener: listener.on_message(self.rank, json.loads(text)))

    def announce(self, value: Any) -> None:
        if self.rank != 0:
            raise UnsupportedError(f"rank {self.rank} announced something; only rank 0 may")
        text = json.dumps(value)
        with self._world.changed:
            self._world.check(self.rank)
            for rank, member in self._world.members.items():
                if rank != 0 and rank not in self._world.left:
                    member.call(lambda listener: listener.on_announced(json.loads(text)))

    def leave(self) -> None:
        with self._world.changed:
            self._world.check(self.rank)
            self._world.left.add(self.rank)
            self._world.changed.notify_all()
            for rank, member in self._world.members.items():
                if rank != self.rank:
                    member.call(lambda listener: listener.on_leave(self.rank))

    def wait_until_all_left(self) -> None:
        world = self._world
        with world.changed:
            while len(world.left) < world.world_size:
                world.check(self.rank)
                world.changed.wait()

    def wait_for_callbacks(self) -> None:
        self._callbacks.wait()

    def close(self) -> None:
        with self._world.changed:
            self._world.members.pop(self.rank, None)
            self._world.changed.notify_all()
        self._callbacks.close()

    # --- called with the world's ``changed`` held, except ``answer_hold`` ---

    def call(self, call: Callable[[Listener], None]) -> None:
        """Enqueue ``call`` on the listener, after all earlier calls."""
        if not self._started:  # the only rank of a world of size 1 needs no thread
            self._started = True
            self._callbacks.start()
        self._callbacks.put(lambda: call(self.listener))

    def answer_hold(self, listener: Listener) -> None:
        steps = listener.hold_steps()
        with self._world.changed:
            if self.rank in self._world.members:
                self._world.answer(self.rank, steps)

    def _raised(self, error: Exception) -> None:
        if not isinstance(error, CommschedError):
            error = TransportError(f"user exception on rank {self.rank}: {type(error).__name__}: {error}")
        self.report(error)
