"""The control channel's events on one rank, and the parts of its session that receive them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..control.events import Listener
from ..core.core import Core
from ..core.errors import CommschedError
from ..core.scheduler import SchedulerConfig

#: The topics of the messages that sessions send each other, beside those of their cores.
TUNER, COMPARE = "tuner", "compare"


class Tuner(Protocol):
    """Callbacks that a session invokes on the tuner, which changes its configuration while training runs; see
    ``tuner/online.py``. Called from a control thread; an implementation must never block."""

    @property
    def is_settled(self) -> bool:
        """Whether no search is under way or about to begin. Any thread."""
        ...

    def on_switch(self, window: Any, steps: Mapping[int, int]) -> None:
        """All ranks will use the configuration proposed with ``window`` from step ``steps[group]`` of each group on. No rank
        has begun these steps."""
        ...

    def on_message(self, rank: int, value: Any) -> None:
        """Rank 0 only: ``rank`` passed ``value`` to ``Session.tell_tuner``."""
        ...

    def on_leave(self, rank: int) -> None:
        """Another rank, ``rank``, has begun its last step."""
        ...

    def close(self, wait: bool) -> None:
        """The session closes: propose nothing more. Called from the thread that closes the session. ``wait``: the tuner may
        take a few seconds to finish its work in progress."""
        ...


class SessionListener(Listener):
    """Passes the control channel's events on: to ``core``, to ``tuner``, which may be set at any time, and to ``on_compared``
    the values that ranks report for comparison. ``left`` are the other ranks that left."""

    def __init__(self, core: Core, on_compared: Callable[[int, Any], None]) -> None:
        self._core = core
        self._on_compared = on_compared
        self.tuner: Tuner | None = None
        self.left: set[int] = set()

    def on_failure(self, error: CommschedError) -> None:
        self._core.fail(error)

    def on_leave(self, rank: int) -> None:
        self.left.add(rank)
        if (tuner := self.tuner) is not None:
            tuner.on_leave(rank)
        self._core.leave(rank)

    def on_parting(self, rank: int, release: Callable[[], None]) -> None:
        self._core.part(rank, release)

    def on_message(self, rank: int, topic: str, value: Any) -> None:
        if topic == TUNER:
            if (tuner := self.tuner) is not None:
                tuner.on_message(rank, value)
        elif topic == COMPARE:
            self._on_compared(rank, value)
        else:
            self._core.on_message(rank, topic, value)

    def on_announced(self, topic: str, value: Any) -> None:
        self._core.on_announced(topic, value)

    def hold_steps(self) -> dict[int, int]:
        return self._core.hold_steps()

    def switch_at(self, config: dict[str, Any], steps: dict[int, int], window: dict[str, Any]) -> None:
        if window and (tuner := self.tuner) is not None:
            tuner.on_switch(window, self._core.without_released(steps))
        self._core.switch_at(SchedulerConfig(**config) if config else None, steps)
