"""Measurements of the forward and of full waits: spans for the trace, the order of first use, and one report of a barrier."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any
from weakref import ref

import torch

from ...core.interfaces import Observer
from .device import Device
from .guard import guard, release
from .slot import CONTRIBUTED, Slot

log = logging.getLogger("commsched")


def trace_forward(model: torch.nn.Module, observer: Observer, forward_ended: Callable[[], None]) -> None:
    """Report the forward of each module that has parameters of its own to ``observer``, and call ``forward_ended`` after each.

    The hooks stay on the model, so this is called only when a trace is wanted. Spans of modules within modules are nested.
    """
    started: dict[int, float] = {}

    def before(module: torch.nn.Module, *_: Any) -> None:
        started[id(module)] = monotonic()

    def after(name: str) -> Callable[..., None]:
        def report(module: torch.nn.Module, *_: Any) -> None:
            observer.on_span("forward", name, started[id(module)], monotonic())
            forward_ended()

        return report

    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after(name or type(module).__name__))


def profiled(what: str, name: str) -> contextlib.AbstractContextManager[object]:
    """Within the context, this thread's work is the range ``commsched.<what> <name>`` of torch's profiler, if one records."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return torch.profiler.record_function(f"commsched.{what} {name}")


_local = threading.local()


@contextlib.contextmanager
def no_use() -> Iterator[None]:
    """Within the context, reads by this thread are not recorded as first use: it broadcasts a model, while another optimizer
    may record the order of first use of its parameters."""
    _local.is_no_use = True
    try:
        yield
    finally:
        _local.is_no_use = False


class FirstUse:
    """Records the order in which the parameters are first used. Parameters that are never used come last, in the order in
    which they were registered."""

    def __init__(self, slots: Sequence[Slot], device: Device) -> None:
        self._slots = {slot.flag: slot for slot in slots}
        self._device = device
        self._order: list[int] = []  # flags, in the order of first use
        self._left_out: set[int] = set()  # flags of parameters that the first forward did not use
        self.is_open = True
        for slot in slots:
            guard(slot.parameter, self._make_recorder(slot))

    def _make_recorder(self, slot: Slot) -> Callable[[], None]:
        weak, flag = ref(self), slot.flag

        def record() -> None:
            me = weak()
            if me is not None and not getattr(_local, "is_no_use", False):
                me._record(flag)

        return record

    def _record(self, flag: int) -> None:
        release(self._slots[flag].parameter)
        self._device.read()
        self._order.append(flag)

    def leave_out(self, slot: Slot) -> None:
        """Stop recording for ``slot``, because the first forward did not use its parameter."""
        self._left_out.add(slot.flag)
        release(slot.parameter)

    def end(self) -> None:
        """Stop recording."""
        self.is_open = False
        for slot in self._slots.values():
            release(slot.parameter)

    def note(self, slots: Sequence[Slot]) -> None:
        """Note that compiled code is about to use the parameters of ``slots``, in this order."""
        self._order += [slot.flag for slot in slots if slot.flag in self._slots and slot.flag not in self._order]

    def order(self) -> list[int]:
        """The flags of all slots, in the order recorded so far."""
        seen = set(self._order)
        return self._order + [flag for flag in self._slots if flag not in seen]

    def unseen(self) -> str | None:
        """The name of a parameter that has a gradient, so was used, but whose use was not recorded; None if there is none."""
        seen = self._left_out.union(self._order)
        return next((slot.name for slot in self._slots.values() if slot.state in CONTRIBUTED and slot.flag not in seen), None)


#: The number of steps in which a line of code waited that are measured before the line is reported.
STEPS = 10

_NOT_THE_USERS = (
    *(f"{directory}/" for directory in (Path(torch.__file__).parent, Path(__file__).parents[2])),
    contextlib.__file__,
)


class FullWaitReport:
    """Measures where this rank waits for all averages of a step at once, instead of for each when the next forward reads it.

    Such waits occur if gradients are read before ``step()``, for a global norm or a log line, or if the update needs all
    gradients. Communication then overlaps with backward only. After :data:`STEPS` such steps the log and ``report`` (see
    ``Session.report_full_wait``) get the line and its cost, and the measurement ends. Ranks without ``report`` measure nothing.
    Call it from the training thread only.
    """

    def __init__(self, report: Callable[[str, str, float, float], object] | None) -> None:
        self._report = report
        self._measures = report is not None
        self._line: tuple[str, str] | None = None  # the line of the first wait in this step, and the reason
        self._waited_seconds = 0.0
        self._last_step_at: float | None = None
        self._steps: dict[
            tuple[str, str], list[tuple[float, float]]
        ] = {}  # by line: seconds waited, and seconds of the whole step

    def waiting(self, why: str) -> contextlib.AbstractContextManager[object]:
        """Return the context for a wait for averages. ``why`` is the reason for the wait, as a clause."""
        return self._measure(why) if self._measures else contextlib.nullcontext()

    @contextlib.contextmanager
    def _measure(self, why: str) -> Iterator[None]:
        if self._line is None:
            self._line = line_of_the_user(), why
        began = monotonic()
        try:
            yield
        finally:
            self._waited_seconds += monotonic() - began

    def step_ended(self) -> None:
        """Called at the end of each ``step()``. A step lasts from one call to the next."""
        if not self._measures:
            return
        now = monotonic()
        if self._line is not None and self._last_step_at is not None:
            steps = self._steps.setdefault(self._line, [])
            steps.append((self._waited_seconds, now - self._last_step_at))
            if len(steps) == STEPS:
                self._tell(*self._line, steps)
        self._last_step_at, self._line, self._waited_seconds = now, None, 0.0

    def _tell(self, line: str, why: str, steps: list[tuple[float, float]]) -> None:
        self._measures = False
        self._steps = {}
        waited, whole = (median(seconds) for seconds in zip(*steps))
        assert self._report is not None
        self._report(line, why, waited, whole)
        log.info(
            "%s: %s, so all averages are waited for there: median %.1f ms of %.1f ms per step (%.0f %%), which the next "
            "forward cannot overlap",
            line,
            why,
            1e3 * waited,
            1e3 * whole,
            100 * waited / whole,
        )


def line_of_the_user() -> str:
    """Return ``file:line`` of the innermost frame of this thread that is in neither torch nor commsched."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
