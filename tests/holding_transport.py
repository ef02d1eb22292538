"""A transport whose averages arrive when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from commsched.core.interfaces import Completion, ForwardingTransport, Transport
from commsched.core.task import CommTask


class HoldingTransport(ForwardingTransport):
    """A transport that keeps the averages for which ``is_held`` is true until :meth:`let_go`. Bytes are sent as ever."""

    def __init__(self, transport: Transport, is_held: Callable[[CommTask], bool]) -> None:
        super().__init__(transport)
        self._is_held = is_held
        self._held: list[tuple[CommTask, Completion]] | None = []
        self._lock = threading.Lock()

    def start(self, task: CommTask, completion: Completion) -> None:
        super().start(task, _Held(self, completion) if self._is_held(task) else completion)

    def let_go(self) -> None:
        """Let the held averages arrive, and hold no more."""
        with self._lock:
            held, self._held = self._held, None
        for task, completion in held or ():
            completion.on_done(task)

    def keep(self, task: CommTask, completion: Completion) -> bool:
        with self._lock:
            if self._held is None:
                return False
            self._held.append((task, completion))
            return True


class _Held:
    """The Completion of a task whose average is held."""

    def __init__(self, transport: HoldingTransport, completion: Completion) -> None:
        self._transport, self._completion = transport, completion

    def on_sent(self, task: CommTask) -> None:
        self._completion.on_sent(task)

    def on_done(self, task: CommTask) -> None:
        if not self._transport.keep(task, self._completion):
            self._completion.on_done(task)
