"""The control channel of ranks that are threads of one process: same promises as ``client.py``, no network."""

from __future__ import annotations

import json
import threading
from typing import Any

from ..core.errors import CommschedError, PeerLost
from .listener import Listener


class LocalControlWorld:
    """Where the ranks of one process meet."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.proposing = threading.Lock()  # one proposal after another
        self.members: dict[int, Listener] = {}
        self.gathered: dict[str, dict[int, Any]] = {}
        self.left: set[int] = set()
        self.failure: CommschedError | None = None

    def join(self, rank: int, listener: Listener) -> LocalControl:
        with self.changed:
            self.members[rank] = listener
        return LocalControl(self, rank)


class LocalControl:
    """One rank's end of a :class:`LocalControlWorld`."""

    clock_offset_seconds = 0.0

    def __init__(self, world: LocalControlWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    def gather(self, tag: str, value: Any) -> list[Any]:
        world = self._world
        with world.changed:
            values = world.gathered.setdefault(tag, {})
            values[self._rank] = json.loads(json.dumps(value))  # as it would arrive over the network
            world.changed.notify_all()
            while len(values) < world.world_size:
                if world.failure is not None:
                    raise world.failure
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
        for listener in members:
            listener.on_failure(error)

    def propose(self, config: dict[str, Any]) -> None:
        with self._world.proposing:
            with self._world.changed:
                members = list(self._world.members.values())
            promised = [listener.hold_steps() for listener in members]
            common = set.intersection(*(set(steps) for steps in promised)) if promised else set()
            steps = {group: max(steps[group] for steps in promised) for group in common}
            for listener in members:
                listener.switch_at(config, steps)

    def leave(self) -> None:
        with self._world.changed:
            self._world.left.add(self._rank)
            self._world.changed.notify_all()
            others = [listener for rank, listener in self._world.members.items() if rank != self._rank]
        for listener in others:
            listener.on_leave(self._rank)

    def wait_until_all_left(self) -> None:
        world = self._world
        with world.changed:
            while len(world.left) < world.world_size:
                if world.failure is not None:
                    raise world.failure
                world.changed.wait()

    def close(self) -> None:
        with self._world.changed:
            self._world.members.pop(self._rank, None)
