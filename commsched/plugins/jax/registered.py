"""A session keeps the groups of its trainings, and the exchanges that states of ``average_gradients`` stand for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import jax

import commsched

from ...core.errors import UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import TensorSpec

if TYPE_CHECKING:
    from .exchange import GradientExchange

_all: weakref.WeakKeyDictionary[commsched.Session, weakref.ref[RegisteredGroups]] = weakref.WeakKeyDictionary()
_adding = threading.Lock()


class RegisteredGroups:
    """The groups of one session, each with its owner, and the exchanges of ``average_gradients``, by the form of gradients.

    A state of ``average_gradients`` holds only a number. So it can be compared, copied and saved like any other, and given to
    another transformation. For that reason it is unknown when the last copy of a state is gone, and exchanges live as long as
    their session.

    Call it only from the thread that makes collective calls.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[weakref.ref[Any], TensorGroup]] = []
        self._by_form: dict[Any, Alike] = {}
        self._count = 0  # calls of add_training()

    @classmethod
    def of(cls, session: commsched.Session) -> RegisteredGroups:
        with _adding:
            known = _all.get(session)
            if known is None or (groups := known()) is None:
                groups = cls()
                session.on_close(groups._finish_steps)  # this callback keeps ``groups`` alive as long as the session
                _all[session] = weakref.ref(groups)
            return groups

    def add(self, owner: object, group: TensorGroup) -> None:
        self._groups.append((weakref.ref(owner), group))

    def release_unowned(self) -> None:
        """Release the buffers of groups whose owners are gone, except of groups whose step is unfinished or was broken off."""
        # Not in the owner's finalizer: Python may collect garbage anywhere, also within the core.
        kept = []
        for owner, group in self._groups:
            if owner() is None and group.unfinished == 0:
                group.release()
            else:
                kept.append((owner, group))
        self._groups = kept

    def _finish_steps(self) -> None:
        """Wait for programs whose calls have returned, but which are still running or have not begun.

        The session itself waits for the averages of their steps.
        """
        if self._groups:
            with suppress(jax.errors.JaxRuntimeError):  # a step failed: reading its values raises the error
                jax.effects_barrier()

    # --- average_gradients ---

    def add_training(self, exchange: GradientExchange | None) -> int:
        """Add ``exchange``; None with one rank. Returns the number for the states of the training."""
        self._count += 1
        if exchange is not None:
            self._by_form.setdefault(form_of(exchange.specs), Alike()).by_number[self._count] = exchange
        return self._count

    def add_restored(self, exchange: GradientExchange) -> Alike:
        """Add ``exchange`` for states that another process has saved. Their number is known once the first one is used."""
        alike = self._by_form[form_of(exchange.specs)] = Alike()
        alike.by_number[_RESTORED] = exchange
        return alike

    def like(self, specs: Sequence[TensorSpec]) -> Alike | None:
        """The exchanges with the shapes and dtypes of ``specs``, including ones added later; None if there are none."""
        return self._by_form.get(form_of(specs))


def form_of(specs: Sequence[TensorSpec]) -> tuple[Any, ...]:
    """Shapes and dtypes. Names may differ between parameters and gradients: some libraries wrap only the parameters."""
    return tuple((spec.shape, spec.dtype) for spec in specs)


_RESTORED = 0  # stands for a number that is not known yet


class Alike:
    """Exchanges of the same shapes and dtypes."""

    def __init__(self) -> None:
        self.by_number: dict[int, GradientExchange] = {}
        self._restored: tuple[int, GradientExchange] | None = None  # the number of states from another process, their exchange
        self._lock = threading.Lock()

    def find(self, number: int) -> GradientExchange:
        """The exchange of states with ``number``. States from another process get the only exchange there is. Any thread.
        Raises UnsupportedError if there are several exchanges and none has that number, or states of two trainings would share
        one."""
        if (exchange := self.by_number.get(number)) is not None:
            return exchange
        first = next(iter(self.by_number.values()))
        with self._lock:
            if self._restored is None and len(self.by_number) == 1:
                self._restored = number, first
            if self._restored is not None and self._restored[0] == number:
                return self._restored[1]
        error = UnsupportedError(
            "average_gradients() cannot say to which of several trainings with such parameters this state belongs (number "
            f"{number}; here there are {', '.join(map(str, self.by_number))}): call tx.init(params) once for each, in the same "
            "order as in the process that saved it"
        )
        first.failures.append(error)  # cs.jit looks for it there
        raise error
