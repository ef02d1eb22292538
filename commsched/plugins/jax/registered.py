"""The groups of exchanges, with the flat buffers of their gradients, kept for each session."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

import jax

import commsched

from ...core.group import TensorGroup
from .trainings import Trainings

_all: weakref.WeakKeyDictionary[commsched.Session, weakref.ref[RegisteredGroups]] = weakref.WeakKeyDictionary()
_adding = threading.Lock()


class RegisteredGroups:
    """The groups of one session, each with its owner, and the session's :class:`Trainings`.

    Call it only from the thread that makes collective calls.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[weakref.ref[Any], TensorGroup]] = []
        self._count = 0
        self.trainings = Trainings()

    @classmethod
    def of(cls, session: commsched.Session) -> RegisteredGroups:
        with _adding:
            known = _all.get(session)
            if known is None or (groups := known()) is None:
                groups = cls()
                session.on_close(groups._finish_steps)  # this callback keeps ``groups`` alive as long as the session
                _all[session] = weakref.ref(groups)
            return groups

    def count_training(self) -> int:
        """Count one more training. Returns its number, which is the same on all ranks."""
        self._count += 1
        return self._count

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
