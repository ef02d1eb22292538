"""A transport whose averages are made when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from commsched.core.interfaces import Completion, ForwardingTransport, Transport
from commsched.core.task import CommTask


class HoldingTransport(ForwardingTransport):
    """A transport that makes the averages for which ``is_held`` is true only after :meth:`let_go`, and says at once that their
    bytes have left. Until then their memory holds no average, so a missing wait shows as a wrong number."""

    def __init__(self, transport: Transport, is_held: Callable[[CommTask], bool]) -> None:
        super().__init__(transport)
        self._is_held = is_held
        self._held: list[tuple[CommTask, Completion]] | None = []
        self._lock = threading.Lock()

    def start(self, task: CommTask, completion: Completion) -> None:
        with self._lock:
            if self._held is not None and self._is_held(task):
                completion.on_sent(task)  # under the lock: a task may be done as soon as `let_go` finds it
                self._held.append((task, completion))
                return
        super().start(task, completion)

    def let_go(self) -> None:
        """Make the held averages, and hold no more."""
        with self._lock:
            held, self._held = self._held, None
        for task, completion in held or ():
            super().start(task, _SentBefore(completion))


class _SentBefore:
    """The Completion of a task whose bytes were said to have left."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion

    def on_sent(self, task: CommTask) -> None:
        """Say it to nobody again."""

    def on_done(self, task: CommTask) -> None:
        self._completion.on_done(task)
