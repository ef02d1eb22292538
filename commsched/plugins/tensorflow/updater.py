"""Updater: the thread that updates each variable once its average arrives, and then opens the variable's gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any
from weakref import WeakMethod

import tensorflow as tf

import commsched

from ...core.errors import ClosedError, CommschedError, TransportError, error_text
from ...core.interfaces import TaskObserver
from ...core.task import CommTask
from ..common.waits import require_may_wait
from .agreement import Agreement
from .exchange import Bundle, GradientExchange
from .gate import Gate, Passage, Signals
from .update import Updates

#: A note on the error that a reader of a variable gets, for example to save it, if a failure has made its update impossible.
_LOST = "an update that was outstanding then is lost, so go on from the last checkpoint, with a new model"


def call_if_alive(method: WeakMethod[Callable[..., Any]], *arguments: Any) -> None:
    """Call a method of what may be gone. A session keeps its callbacks, which must not keep a model that was detached."""
    its = method()
    if its is not None:
        its(*arguments)


class Updater:
    """One gate for each variable, and one thread, ``commsched-update``.

    The thread makes the outstanding updates, front layers first, as far as their averages are available. It runs beside the
    user's step, because TensorFlow releases Python's lock while it computes.
    """

    def __init__(self, session: commsched.Session, variables: Sequence[tf.Variable], agreement: Agreement) -> None:
        count = len(variables)
        # Two gates beside those of the variables. ``all_open`` opens after all updates, ``arrived`` when all averages have
        # arrived, for optimizers that need them at once.
        self.all_open, self.arrived = count, count + 1
        self.signals = Signals(count + 2)
        self.exchange: GradientExchange | None = None  # set with the first step
        self._session = session
        self._agreement = agreement
        self._changed = threading.Condition()
        self.gates = [
            Gate(index, variable, self.signals, lambda index=index: self._wait(index))  # type: ignore[misc]
            for index, variable in enumerate(variables)
        ]
        self._awaiting = False  # whether ``arrived`` is closed until all averages arrive
        self.state: list[tf.Variable] = []  # the optimizer's variables that have a settle function
        # The outstanding updates, front layers first: the compiled functions, the learning rate, the number of the step.
        self._due: dict[Bundle, tuple[Updates, Any, Any]] = {}
        self._since = self._warned = 0.0  # when the thread's wait for averages began, and its length at the last warning
        self._was_submitted = True  # whether this rank was seen to have submitted all gradients
        self._alike = True  # whether ranks were found alike in this step; True before the first step
        self._error: CommschedError | None = None
        self._ends = False
        self._forget = session.observe(TaskObserver(self._on_task))
        session.when_failed(partial(call_if_alive, WeakMethod(self._on_failure)))
        self._thread = threading.Thread(target=self._run, name="commsched-update", daemon=True)
        self._thread.start()

    # --- the user's threads, and TensorFlow's threads ---

    def prepare(self, bundles: Sequence[Bundle]) -> None:
        """Compile the functions that open the gates of ``bundles``, so that nothing is compiled after ``commit``."""
        for gates in [*bundles, (self.all_open,)]:
            self.signals.prepare(gates)

    def commit(self, updates: Updates, bundles: Sequence[Bundle], learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
        """Close all gates, and update the variables of each bundle when their averages arrive. Call it once all gradients are
        submitted. Raises CommschedError if the session failed, or this updater was closed meanwhile, so gates would not open
        any more."""
        with self._changed:
            self._require_running()
            self.signals.close(range(self.all_open + 1))
            for gate in self.gates:
                gate.is_closed = True
            self._due = dict.fromkeys(bundles, (updates, learning_rate, iterations))
            self._alike = False
            self._wait_begins()
            self._changed.notify_all()

    def await_all(self) -> None:
        """Close the gate ``arrived`` until all averages of the step that has begun have arrived. Raises as ``commit``."""
        with self._changed:
            self._require_running()
            self.signals.close([self.arrived])
            self._awaiting, self._was_submitted = True, False
            self._alike = False
            self._wait_begins()
            self._changed.notify_all()

    def _require_running(self) -> None:
        if self._error is not None:
            raise self._error

    def synchronize(self) -> None:
        """Wait until no update is outstanding. Raises CommschedError if the session failed or was closed."""
        for index, gate in enumerate(self.gates):
            if gate.is_closed:
                self._wait(index)

    def wait_for_flags(self) -> None:
        """Wait until all ranks have begun the last step and were found alike. Raises CommschedError if the ranks differ, or the
        session failed or was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._alike or self._error is not None)
            self._require_running()

    def make_settle(self, state: tf.Variable) -> Callable[[], None]:
        """A function that settles the optimizer's variable ``state``. It waits for all updates, since any of them may change
        ``state``."""
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
        require_may_wait(f"'{self.gates[index].variable.name}', whose update is outstanding,")
        try:
            exchange.wait(index)  # warns of a long wait, and raises the failure of the session
            with self._changed:
                self._changed.wait_for(lambda: not self.gates[index].is_closed or self._error is not None)
                if self.gates[index].is_closed and self._error is not None:
                    raise self._error
        except CommschedError as error:
            if _LOST not in getattr(error, "__notes__", ()):
                error.add_note(_LOST)
            raise

    def close(self) -> None:
        """End the thread. Outstanding updates are not made, and readers that wait for them get an error. Idempotent."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._forget()

    # --- the session's threads: events that may have opened a proxy ---

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
            if not bundle:
                self._require_alike()
                continue
            with self._changed:
                updates, learning_rate, iterations = self._due[bundle]
            try:
                self._update(bundle, updates, learning_rate, iterations)
            except BaseException as error:
                # The update may be half made, so the job must fail on all ranks.
                name = self._name_of(bundle)
                ours = TransportError(f"rank {self._session.rank}: the update of '{name}' raised {error_text(error)}")
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

    def _require_alike(self) -> None:
        """Require ranks that are alike, before any update of the step. It also runs if gradients never arrive, because another
        rank does something else."""
        assert self.exchange is not None
        try:
            self.exchange.require_alike()
        except CommschedError as error:
            with self._changed:
                self._due.clear()
            self._session.report(error)
        with self._changed:
            if self._due:
                self._agreement.weights_check.begin(self.exchange.step)
            self._alike = True
            self._changed.notify_all()

    def _next(self) -> Bundle | None:
        """Wait for the thread's next work, and return the front-most bundle that can be updated; an empty one if the ranks must
        be compared first, None if no updates will follow."""
        with self._changed:
            self._wait_begins()
            while self._error is None and not self._ends:
                exchange = self.exchange
                if exchange is not None and not self._alike:  # averages may arrive before the flags
                    if exchange.flags.is_there:
                        return ()
                elif exchange is not None:
                    for bundle in self._due:
                        if exchange.is_there(bundle):
                            return bundle
                    if self._awaiting and exchange.all_there():
                        self._awaiting = False
                        self.signals.open((self.arrived,))
                self._wait_for_change()
            return None

    def _wait_begins(self) -> None:
        """Called with the lock held."""
        self._since, self._warned = monotonic(), 0.0

    def _wait_for_change(self) -> None:
        """Wait, or say for whom graphs have waited too long: they cannot say so themselves. Called with the lock held."""
        exchange = self.exchange
        if exchange is None or not (self._due or self._awaiting):
            self._changed.wait()
            return
        if not self._was_submitted:  # backward still ran on this rank
            self._was_submitted = exchange.is_submitted
            self._wait_begins()
        seconds = monotonic() - self._since
        left = self._session.core.next_warning(self._warned) - seconds
        if left > 0:
            self._changed.wait(left)
            return
        self._warned = seconds
        exchange.stalled(next(iter(self._due), tuple(exchange.forward_order)), seconds)

    def _update(self, bundle: Bundle, updates: Updates, learning_rate: Any, iterations: Any) -> None:
        assert self.exchange is not None
        average = self.exchange.average_of_bundle(bundle)
        if average is not None:
            began = monotonic()
            updates.update(bundle, average, learning_rate, iterations)
            if self._session.observer is not None:
                self._session.observer.on_span("update", self._name_of(bundle), began, monotonic())
        for index in bundle:
            self._agreement.check(index)

    def _name_of(self, bundle: Bundle) -> str:
        assert self.exchange is not None
        return self.exchange.name_of(bundle)

    def _fail(self) -> None:
        """Wake all waiting graphs with the failure. Eager readers of stale variables find the gates closed."""
        with self._changed:
            if self._error is None:
                self._error = ClosedError("this session is closed")
                if not self._awaiting and not any(gate.is_closed for gate in self.gates):
                    return
            self.signals.fail(f"{error_text(self._error)}; {_LOST}")
            self._changed.notify_all()
