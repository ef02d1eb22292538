"""A thread that waits for gloo's point-to-point messages, which do not report that they are done."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

from torch import Tensor
from torch.distributed import Work

from ...collective import Done

#: The time limit of each wait after a failure, when no further message comes.
_AT_ONCE = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Outstanding messages, and how long to wait for each. ``tensors`` keeps their memory alive: gloo has only its address."""

    works: Sequence[Work]
    tensors: Sequence[Tensor]
    patience: timedelta
    done: Done


class Waiter:
    """A thread that waits for exchanges, in the order they came, and calls their ``done``."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[PendingWork | None] = SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, exchange: PendingWork) -> None:
        self._queue.put(exchange)

    def close(self) -> None:
        """Return when every exchange that was put is done or has failed."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (exchange := self._queue.get()) is not None:
            exchange.done(self._wait(exchange))
            del exchange  # its memory may be reused before the next exchange comes

    def _wait(self, exchange: PendingWork) -> BaseException | None:
        for work in exchange.works:
            try:
                work.wait(_AT_ONCE if self._failed else exchange.patience)
            except RuntimeError as error:
                # gloo ends all connections of a group when one wait times out, so no other message will come either. The
                # messages of this exchange are dropped with it, and gloo does not touch their memory afterwards.
                self._failed = True
                return error
        return None
