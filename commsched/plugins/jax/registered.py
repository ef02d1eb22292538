"""What a session keeps for exchanges: their groups, with the buffers of their gradients."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Any

import jax

import commsched

from ...core.group import TensorGroup

_all: weakref.WeakKeyDictionary[commsched.Session, weakref.ref[RegisteredGroups]] = weakref.WeakKeyDictionary()
_adding = threading.Lock()


class RegisteredGroups:
    """The groups of one session, each with its owner.

    For the thread on which ranks meet.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[weakref.ref[Any], TensorGroup]] = []

    @classmethod
    def of(cls, session: commsched.Session) -> RegisteredGroups:
        with _adding:
            known = _all.get(session)
            if known is None or (groups := known()) is None:
                groups = cls()
                session.on_close(groups._finish_steps)  # by which the session has them
                _all[session] = weakref.ref(groups)
            return groups

    def add(self, owner: object, group: TensorGroup) -> None:
        self._groups.append((weakref.ref(owner), group))

    def release_unowned(self) -> None:
        """Let go of the buffers of those whose owners are gone; not of one that is on its way, or that was broken off."""
        # Not where an owner goes: that may be anywhere within the core too, wherever Python collects garbage.
        kept = []
        for owner, group in self._groups:
            if owner() is None and group.unfinished == 0:
                group.release()
            else:
                kept.append((owner, group))
        self._groups = kept

    def _finish_steps(self) -> None:
        """Steps whose calls have returned may still be running, or not have begun. For their averages the session waits."""
        if self._groups:
            with suppress(jax.errors.JaxRuntimeError):  # of a step that failed: whoever reads its values is told
                jax.effects_barrier()
