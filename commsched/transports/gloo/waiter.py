"""Point-to-point messages of gloo do not say when they are done: somebody has to wait."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

from torch import Tensor
from torch.distributed import Work

from ..collective import Done

#: For what remains of an exchange that has failed: its messages are not awaited.
_AT_ONCE = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages under way, the memory that gloo writes and reads by its address alone, and how long to wait for each."""

    works: Sequence[Work]
    tensors: Sequence[Tensor]
    patience: timedelta
    done: Done


class Waiter:
    """A thread that waits for exchanges, first come first served, and calls their ``done``."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Exchange | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, exchange: Exchange) -> None:
        self._queue.put(exchange)

    def close(self) -> None:
        """Return when all that was put is done, or has failed."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (exchange := self._queue.get()) is not None:
            exchange.done(self._wait(exchange))
            del exchange  # its memory may be wanted before the next comes

    def _wait(self, exchange: Exchange) -> BaseException | None:
        for work in exchange.works:
            try:
                work.wait(_AT_ONCE if self._failed else exchange.patience)
            except RuntimeError as error:
                # gloo ends all connections of a group when one wait was in vain, so no other message will come either. Those
                # of this exchange are dropped with it: after that, gloo does not touch their memory.
                self._failed = True
                return error
        return None
