"""Updater: the thread that updates each variable once its average is there, and then opens its gate."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import tensorflow as tf

import commsched

from ...core.errors import ClosedError, CommschedError, TransportError
from ...core.task import CommTask
from .exchange import GradientExchange
from .gate import Gate, Passage, Signals, Wait
from .update import Updates

log = logging.getLogger("commsched")

_WARN_AFTER_SECONDS = 10.0


class Updater:
    """One gate for each variable, and one thread, ``commsched-update``.

    The thread takes what is due front layers first, as far as averages are there. It runs beside the user's step: TensorFlow
    releases Python's lock while it computes.

    ``arrived`` is for optimizers that need all averages at once; ``all_open`` for what comes after all updates.
    """

    def __init__(self, session: commsched.Session, variables: Sequence[tf.Variable], paths: Sequence[str]) -> None:
        self.signals = Signals(len(variables))
        self.exchange: GradientExchange | None = None  # with the first step
        self._session = session
        self._paths = paths
        self._changed = threading.Condition()
        self.gates = [
            Gate(index, variable, self.signals, self._changed, lambda index=index: self._wait(index))  # type: ignore[misc]
            for index, variable in enumerate(variables)
        ]
        self.all_open = Wait(
            self._changed,
            self.signals,
            lambda: any(gate.is_closed for gate in self.gates),
            lambda: tf.reduce_any(self.signals.closed),
        )
        self.arrived = Wait(self._changed, self.signals, lambda: self._awaiting, self.signals.awaiting.read_value)
        self._waits = [*(gate.wait for gate in self.gates), self.all_open, self.arrived]
        self._awaiting = False  # all averages
        self.state: list[tf.Variable] = []  # of the optimizer
        self._due: dict[int, tuple[Updates, Any, Any]] = {}  # by index, front first: how, learning rate, number of the step
        self._error: CommschedError | None = None
        self._ends = False
        self._forget = session.observe(self)
        session.when_failed(self._on_failure)
        self._thread = threading.Thread(target=self._run, name="commsched-update", daemon=True)
        self._thread.start()

    # --- the user's threads, and those of TensorFlow ---

    def commit(self, updates: Updates, learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
        """All gradients are handed over: update each variable when its average is there, and let no reader see it before."""
        assert self.exchange is not None
        with self._changed:
            self.signals.close_all()
            for gate in self.gates:
                gate.is_closed = True
            self._due = dict.fromkeys(self.exchange.forward_order, (updates, learning_rate, iterations))
            self._changed.notify_all()

    def await_all(self) -> None:
        """``arrived`` is from now on to wait for all averages of the step that has begun."""
        with self._changed:
            self.signals.awaiting.assign(True)
            self._awaiting = True
            self._changed.notify_all()

    def synchronize(self) -> None:
        """Wait until no update is due.

        Raises:
            CommschedError: the session failed or was closed.
        """
        for index, gate in enumerate(self.gates):
            if gate.is_closed:
                self._wait(index)

    def make_settle(self, state: tf.Variable) -> Callable[[], None]:
        """What settles ``state`` of the optimizer: it may be that of any variable."""
        self.state.append(state)
        passage = Passage(state, lambda: [self.all_open])

        def settle() -> None:
            if tf.executing_eagerly():
                self.synchronize()
            else:
                passage.add()

        return settle

    def _wait(self, index: int) -> None:
        exchange = self.exchange
        assert exchange is not None
        exchange.wait(index)  # which warns, and raises what the session failed by
        with self._changed:
            self._changed.wait_for(lambda: not self.gates[index].is_closed or self._error is not None)
            if self.gates[index].is_closed and self._error is not None:
                raise self._error

    def close(self) -> None:
        """End the thread; what is due is not waited for, and its readers are told. Idempotent."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._forget()

    # --- the session's threads: what may have opened a proxy ---

    def on_task(self, task: CommTask) -> None:
        with self._changed:
            self._changed.notify_all()

    def on_step(self, group: int, step: int, at: float) -> None:
        pass

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        pass

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        pass

    def _on_failure(self, error: CommschedError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # --- commsched-update ---

    def _run(self) -> None:
        while (index := self._next()) is not None:
            with self._changed:
                updates, learning_rate, iterations = self._due[index]
            try:
                self._update(index, updates, learning_rate, iterations)
            except BaseException as error:
                # Half an update: no rank may go on from here as if nothing were.
                ours = TransportError(
                    f"rank {self._session.rank}: the update of '{self._paths[index]}' raised {type(error).__name__}: {error}"
                )
                with self._changed:
                    self._due.clear()
                self._session.report(ours)
                continue
            with self._changed:
                del self._due[index]
                self.gates[index].open()
                self.all_open.look()
                self._changed.notify_all()
        self._fail()

    def _next(self) -> int | None:
        """The index of the front-most variable that can be updated, once there is one; None: no more updates."""
        since = monotonic()
        with self._changed:
            while self._error is None and not self._ends:
                exchange = self.exchange
                if exchange is not None:
                    for index in self._due:
                        if exchange.is_there(index):
                            return index
                    if self._awaiting and exchange.all_there():
                        self._awaiting = False
                        self.signals.awaiting.assign(False)
                        self.arrived.look()
                if not self._changed.wait(_WARN_AFTER_SECONDS):
                    self._warn(monotonic() - since)
            return None

    def _warn(self, seconds: float) -> None:
        if self._due:
            names = [self._paths[index] for index in self._due]
            log.warning("rank %d has waited %.0f s for the average of '%s'", self._session.rank, seconds, names[0])

    def _update(self, index: int, updates: Updates, learning_rate: Any, iterations: Any) -> None:
        assert self.exchange is not None
        average = self.exchange.average(index)
        if average is None:
            return
        began = monotonic()
        updates.update(index, average, learning_rate, iterations)
        if self._session.observer is not None:
            self._session.observer.on_span("update", self._paths[index], began, monotonic())

    def _fail(self) -> None:
        """Let go all graphs that wait, having told them why. Eager readers of stale variables find the gates closed."""
        with self._changed:
            if self._error is None:
                self._error = ClosedError("this session is closed")
                if not self._awaiting and not any(gate.is_closed for gate in self.gates):
                    return
            self.signals.fail(f"{type(self._error).__name__}: {self._error}")
            for wait in self._waits:
                wait.fail()
            self._changed.notify_all()
