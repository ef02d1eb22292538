"""The control channel's events on one rank, and the parts of its session that receive them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..control.events import Listener
from ..core.config import SchedulerConfig
from ..core.core import Core
from ..core.errors import CommschedError


class Tuner(Protocol):
    """Callbacks that a session invokes on the tuner, which changes its configuration while training runs; see
    ``tuner/online.py``. Called from a control thread; an implementation must never block."""

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
    """The session's listener. It exists before the core: events for the core, from ranks that have opened
    earlier, are kept until there is one. ``on_compared`` receives the values that ranks report for comparison.

    ``failure`` is the first failure of the job, if there was one; ``left`` are the other ranks that left; ``tuner`` may be set
    at any time.
    """

    def __init__(self, on_compared: Callable[[int, Any], None]) -> None:
        self._on_compared = on_compared
        self.tuner: Tuner | None = None
        self.failure: CommschedError | None = None
        self.left: set[int] = set()
        self._when_failed: list[Callable[[CommschedError], None]] = []
        self._failing = threading.Lock()  # guards failure and _when_failed
        self._core: Core | None = None
        self._early: list[Callable[[Core], object]] = []
        self._opening = threading.Lock()  # guards _core and _early

    def use(self, core: Core) -> None:
        """Pass ``core`` the events that came before it, and from now on every event."""
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
        self.left.add(rank)
        if (tuner := self.tuner) is not None:
            tuner.on_leave(rank)
        self._on_core(lambda core: core.leave(rank))

    def on_parting(self, rank: int, release: Callable[[], None]) -> None:
        self._on_core(lambda core: core.part(rank, release))

    def on_message(self, rank: int, value: Any) -> None:
        if "tuner" in value:
            if (tuner := self.tuner) is not None:
                tuner.on_message(rank, value["tuner"])
        elif "compare" in value:
            self._on_compared(rank, value["compare"])
        else:
            self._on_core(lambda core: core.on_message(rank, value))

    def on_announced(self, value: Any) -> None:
        self._on_core(lambda core: core.on_announced(value))

    def hold_steps(self) -> dict[int, int]:
        with self._opening:
            core = self._core
            if core is None:
                self._early.append(lambda core: core.hold_steps())  # there is no group yet, but there may be one soon
                return {}
        return core.hold_steps()

    def switch_at(self, config: dict[str, Any], steps: dict[int, int]) -> None:
        window = config.pop("window", None)
        if window is not None and (tuner := self.tuner) is not None:
            tuner.on_switch(window, self._core.without_released(steps) if self._core is not None else steps)
        self._on_core(lambda core: core.switch_at(SchedulerConfig(**config) if config else None, steps))

    def _on_core(self, call: Callable[[Core], None]) -> None:
        """Run ``call`` with the core: now, or when there is one. The calls keep their order, since one control thread makes all
        of them."""
        with self._opening:
            if self._core is None:
                self._early.append(call)
                return
        call(self._core)
