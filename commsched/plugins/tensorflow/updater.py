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
from ...core.observers import TaskObserver
from ...core.task import CommTask
from .exchange import Bundle, GradientExchange
from .gate import Gate, Passage, Signals
from .update import Updates

log = logging.getLogger("commsched")

_WARN_AFTER_SECONDS = 10.0


class Updater:
    """One gate for each variable, and one thread, ``commsched-update``.

    The thread takes what is due front layers first, as far as averages are there. It runs beside the user's step: TensorFlow
    releases Python's lock while it computes.
    """

    def __init__(self, session: commsched.Session, variables: Sequence[tf.Variable]) -> None:
        count = len(variables)
        # Beside those of the variables: where what comes after all updates waits, and who needs all averages at once.
        self.all_open, self.arrived = count, count + 1
        self.signals = Signals(count + 2)
        self.exchange: GradientExchange | None = None  # with the first step
        self._session = session
        self._changed = threading.Condition()
        self.gates = [
            Gate(index, variable, self.signals, lambda index=index: self._wait(index))  # type: ignore[misc]
            for index, variable in enumerate(variables)
        ]
        self._awaiting = False  # all averages
        self.state: list[tf.Variable] = []  # of the optimizer
        self._due: dict[Bundle, tuple[Updates, Any, Any]] = {}  # front first: how, learning rate, number of the step
        self._error: CommschedError | None = None
        self._ends = False
        self._forget = session.observe(TaskObserver(self._on_task))
        session.when_failed(self._on_failure)
        self._thread = threading.Thread(target=self._run, name="commsched-update", daemon=True)
        self._thread.start()

    # --- the user's threads, and those of TensorFlow ---

    def prepare(self, bundles: Sequence[Bundle]) -> None:
        """For ``commit``, which should not have to compile anything."""
        for gates in [*bundles, (self.all_open,)]:
            self.signals.prepare(gates)

    def commit(self, updates: Updates, bundles: Sequence[Bundle], learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
        """All gradients are handed over: update the variables of each bundle when their averages are there, and let no reader
        see them before.

        Raises:
            CommschedError: the session failed, or this was closed meanwhile: gates would open no more.
        """
        with self._changed:
            self._require_running()
            self.signals.close(range(self.all_open + 1))
            for gate in self.gates:
                gate.is_closed = True
            self._due = dict.fromkeys(bundles, (updates, learning_rate, iterations))
            self._changed.notify_all()

    def await_all(self) -> None:
        """``arrived`` is from now on to wait for all averages of the step that has begun. Raises as ``commit``."""
        with self._changed:
            self._require_running()
            self.signals.close([self.arrived])
            self._awaiting = True
            self._changed.notify_all()

    def _require_running(self) -> None:
        if self._error is not None:
            raise self._error

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
        passage = Passage(state, self.signals, self.all_open)

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

    def _on_task(self, task: CommTask) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_failure(self, error: CommschedError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # --- commsched-update ---

    def _run(self) -> None:
        while (bundle := self._next()) is not None:
            with self._changed:
                updates, learning_rate, iterations = self._due[bundle]
            try:
                self._update(bundle, updates, learning_rate, iterations)
            except BaseException as error:
                # Half an update: no rank may go on from here as if nothing were.
                name = self._name_of(bundle)
                ours = TransportError(
                    f"rank {self._session.rank}: the update of '{name}' raised {type(error).__name__}: {error}"
                )
                with self._changed:
                    self._due.clear()
                self._session.report(ours)
                continue
            with self._changed:
                del self._due[bundle]
                self.signals.open(bundle)
                for index in bundle:
                    self.gates[index].is_closed = False
                if not self._due:
                    self.signals.open((self.all_open,))
                self._changed.notify_all()
        self._fail()

    def _next(self) -> Bundle | None:
        """The front-most that can be updated, once there is one; None: no more updates."""
        since = monotonic()
        with self._changed:
            while self._error is None and not self._ends:
                exchange = self.exchange
                if exchange is not None:
                    for bundle in self._due:
                        if exchange.is_there(bundle):
                            return bundle
                    if self._awaiting and exchange.all_there():
                        self._awaiting = False
                        self.signals.open((self.arrived,))
                if not self._changed.wait(_WARN_AFTER_SECONDS):
                    self._warn(monotonic() - since)
            return None

    def _warn(self, seconds: float) -> None:
        if self._due:
            name = self._name_of(next(iter(self._due)))
            log.warning("rank %d has waited %.0f s for the average of '%s'", self._session.rank, seconds, name)

    def _update(self, bundle: Bundle, updates: Updates, learning_rate: Any, iterations: Any) -> None:
        assert self.exchange is not None
        self.exchange.require_same_learning_rate()
        average = self.exchange.average_of_bundle(bundle)
        if average is None:
            return
        began = monotonic()
        updates.update(bundle, average, learning_rate, iterations)
        if self._session.observer is not None:
            self._session.observer.on_span("update", self._name_of(bundle), began, monotonic())

    def _name_of(self, bundle: Bundle) -> str:
        assert self.exchange is not None
        return self.exchange.name_of(bundle)

    def _fail(self) -> None:
        """Let go all graphs that wait, having told them why. Eager readers of stale variables find the gates closed."""
        with self._changed:
            if self._error is None:
                self._error = ClosedError("this session is closed")
                if not self._awaiting and not any(gate.is_closed for gate in self.gates):
                    return
            self.signals.fail(f"{type(self._error).__name__}: {self._error}")
            self._changed.notify_all()
