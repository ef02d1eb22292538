"""An NcclGroup over the host's memory: what is launched is done later, by a thread per rank that stands for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch


class MemoryEvent:
    def __init__(self) -> None:
        self.happened = threading.Event()
        self.error: Exception | None = None

    def synchronize(self) -> None:
        self.happened.wait()
        if self.error is not None:
            raise self.error


class MemoryNetwork:
    """Where the ranks' devices meet."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self.given: list[list[torch.Tensor]] = [[] for _ in range(world_size)]


class MemoryGroup:
    device = torch.device("cpu")

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._error = ""
        self.calls: list[str] = []
        self._queue: SimpleQueue[tuple[Callable[[], None], MemoryEvent] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="a device", daemon=True)
        self._thread.start()

    # --- within what is launched ---

    def all_reduce(self, values: torch.Tensor) -> None:
        self.calls.append("all_reduce")
        everybodys = self._meet([values])
        values.copy_(_sum([tensors[0] for tensors in everybodys]))

    def reduce_scatter(self, chunks: Sequence[torch.Tensor]) -> None:
        self.calls.append("reduce_scatter")
        own = _sum([tensors[self._rank] for tensors in self._meet(chunks)])
        for chunk in chunks:
            chunk.fill_(99)  # undefined, says the interface
        chunks[self._rank].copy_(own)

    def all_gather(self, chunks: Sequence[torch.Tensor]) -> None:
        self.calls.append("all_gather")
        for chunk, everybodys in zip(chunks, self._meet([chunks[self._rank]])):
            chunk.copy_(everybodys[0])

    def _meet(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What every rank brought, as it was then."""
        self._network.given[self._rank] = [tensor.clone() for tensor in tensors]
        self._network.barrier.wait()
        everybodys = list(self._network.given)
        self._network.barrier.wait()
        return everybodys

    # --- NcclGroup ---

    def launch(self, work: Callable[[], None]) -> MemoryEvent:
        event = MemoryEvent()
        self._queue.put((work, event))
        return event

    def error(self) -> str:
        return self._error

    def abort(self) -> None:
        self._error = "it was aborted"
        self._network.barrier.abort()
        self._queue.put(None)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, event = item
            try:
                work()
            except threading.BrokenBarrierError:
                pass  # a device ends what is aborted without a word
            except Exception as error:
                event.error = error
            event.happened.set()


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
