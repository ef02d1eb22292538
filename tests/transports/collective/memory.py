"""A backend of collectives whose ranks are objects in one thread: the last to come does the work of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commsched.transports.collective import Done


class Network:
    """Where the channels of all ranks meet. Keeps how many bytes each rank sent point to point."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent_bytes = [0] * world_size
        self.sums: dict[int, list[tuple[memoryview, str, Done]]] = {}
        self.messages: dict[tuple[int, int, int], list[tuple[memoryview, Exchange]]] = {}

    def channel(self, rank: int) -> MemoryChannel:
        return MemoryChannel(self, rank)


class Exchange:
    """Counts what of it is still to come."""

    def __init__(self, count: int, done: Done) -> None:
        self.missing = count
        self.done = done

    def one_more(self) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.done(None)


class MemoryChannel:
    native = frozenset({"float32", "float64", "uint8"})

    def __init__(self, network: Network, rank: int) -> None:
        self.rank = rank
        self.world_size = network.world_size
        self.network = network
        self.launched = 0
        self.tags: list[int] = []
        self.broken: Exception | None = None
        self.raises = False  # or says so by ``done``
        self.closed: bool | None = None

    def all_reduce(self, data: memoryview, dtype: str, done: Done) -> None:
        if self.broken:
            return self._fail(done)
        waiting = self.network.sums.setdefault(self.launched, [])
        self.launched += 1
        waiting.append((data, dtype, done))
        if len(waiting) == self.world_size:
            arrays = [np.frombuffer(data, dtype) for data, dtype, _ in waiting]
            total = np.sum(arrays, axis=0, dtype=arrays[0].dtype)
            for array in arrays:
                array[:] = total
            for _, _, done in waiting:
                done(None)

    def exchange(
        self, tag: int, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]], done: Done
    ) -> None:
        if self.broken:
            return self._fail(done)
        assert sends or receives
        self.tags.append(tag)
        exchange = Exchange(len(sends) + len(receives), done)
        for peer, data in sends:
            self.network.sent_bytes[self.rank] += len(data)
            self._meet((tag, self.rank, peer), data, exchange, sending=True)
        for peer, data in receives:
            self._meet((tag, peer, self.rank), data, exchange, sending=False)

    def _fail(self, done: Done) -> None:
        assert self.broken is not None
        if self.raises:
            raise self.broken
        done(self.broken)

    def _meet(self, key: tuple[int, int, int], data: memoryview, exchange: Exchange, sending: bool) -> None:
        assert key[1] != key[2]
        assert len(data)
        other = self.network.messages.pop(key, None)
        if other is None:
            self.network.messages[key] = [(data, exchange)]
            return
        ((theirs, their_exchange),) = other
        source, target = (data, theirs) if sending else (theirs, data)
        np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)
        exchange.one_more()
        their_exchange.one_more()

    def close(self, graceful: bool) -> None:
        assert self.closed is None
        self.closed = graceful
