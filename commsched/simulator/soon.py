"""Soon: something that is to happen once in this moment of virtual time, after what is already under way."""

from __future__ import annotations

from collections.abc import Callable

from .clock import VirtualClock


class Soon:
    """Calling it lets ``action`` happen at the end of the present moment, once however often it was called.

    All that becomes ready in one moment is known before one of it is chosen.
    """

    def __init__(self, clock: VirtualClock, action: Callable[[], None]) -> None:
        self._clock = clock
        self._action = action
        self._asked = False

    def __call__(self) -> None:
        if not self._asked:
            self._asked = True
            self._clock.call_at(self._clock.now, self._run)

    def _run(self) -> None:
        self._asked = False
        self._action()
