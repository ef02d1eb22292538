"""What the control channel tells one rank, and to whom in its session it is passed on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .core.config import SchedulerConfig
from .core.core import Core
from .core.errors import CommschedError


class Tuner(Protocol):
    """What a session tells who changes its configuration while training runs; see ``tuner/online.py``. Called from a control
    thread; never blocks."""

    def on_switch(self, window: Any, steps: Mapping[int, int]) -> None:
        """All ranks will use what was proposed with ``window`` from ``steps[group]`` of each group on; none has begun them."""
        ...

    def on_told(self, rank: int, value: Any) -> None:
        """For rank 0: what ``rank`` passed to ``Session.tell_tuner``."""
        ...

    def on_leave(self, rank: int) -> None:
        """``rank``, another one, has begun its last step."""
        ...

    def close(self, wait: bool) -> None:
        """The session closes: propose nothing more. From the thread that closes it. ``wait``: it has time, a few seconds, for
        what is under way."""
        ...


class SessionListener:
    """A ``control.listener.Listener``. It is there before the core is: what other ranks, that have opened, want of a core still
    to come is kept for it.

    ``failure`` is the first failure of the job, if there was one; ``tuner`` may be set at any time.
    """

    def __init__(self) -> None:
        self.tuner: Tuner | None = None
        self.failure: CommschedError | None = None
        self._when_failed: list[Callable[[CommschedError], None]] = []
        self._failing = threading.Lock()  # guards both
        self._core: Core | None = None
        self._early: list[Callable[[Core], None]] = []
        self._opening = threading.Lock()  # guards both

    def use(self, core: Core) -> None:
        """Tell ``core`` what came before it, and from now on all that comes."""
        with self._opening:
            for call in self._early:
                call(core)
            self._early.clear()
            self._core = core
        if self.failure is not None:
            core.fail(self.failure)

    def when_failed(self, callback: Callable[[CommschedError], None]) -> None:
        """See ``Session.when_failed``."""
        with self._failing:
            failure = self.failure
            if failure is None:
                self._when_failed.append(callback)
        if failure is not None:
            callback(failure)

    # --- Listener ---

    def on_failure(self, error: CommschedError) -> None:
        with self._failing:
            self.failure = self.failure or error
            callbacks, self._when_failed = self._when_failed, []
        for callback in callbacks:
            callback(self.failure)
        if self._core is not None:
            self._core.fail(error)

    def on_leave(self, rank: int) -> None:
        if (tuner := self.tuner) is not None:
            tuner.on_leave(rank)
        self._on_core(lambda core: core.leave(rank))

    def on_told(self, rank: int, value: Any) -> None:
        if "tuner" in value:
            if (tuner := self.tuner) is not None:
                tuner.on_told(rank, value["tuner"])
            return
        self._on_core(lambda core: core.on_told(rank, value))

    def on_announced(self, value: Any) -> None:
        self._on_core(lambda core: core.on_announced(value))

    def on_end(self) -> None:
        """For servers; a rank waits for it in ``Session.close``."""

    def hold_steps(self) -> dict[int, int]:
        return self._core.hold_steps() if self._core is not None else {}

    def switch_at(self, config: dict[str, Any], steps: dict[int, int]) -> None:
        window = config.pop("window", None)
        if window is not None and (tuner := self.tuner) is not None:
            tuner.on_switch(window, steps)
        self._on_core(lambda core: core.switch_at(SchedulerConfig(**config) if config else None, steps))

    def _on_core(self, call: Callable[[Core], None]) -> None:
        """Call, or have called when the core is there; in order, since one control thread does all this."""
        with self._opening:
            if self._core is None:
                self._early.append(call)
                return
        call(self._core)
