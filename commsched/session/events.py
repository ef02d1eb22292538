"""The control channel's events on one rank, and the parts of its session that receive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ..control.events import Listener
from ..core.core import Core
from ..core.errors import CommschedError
from ..core.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from ..tuner.meter import StepTimer
    from ..tuner.online import OnlineTuner

#: The topics of the messages that sessions send each other, beside those of their cores.
TUNER, COMPARE = "tuner", "compare"

#: The tuner of a rank, which a session notifies of changes of the configuration while training runs: on rank 0 it proposes
#: them, on other ranks it only measures. The callbacks are called from a control thread, and never block.
Tuner: TypeAlias = "OnlineTuner | StepTimer"


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
