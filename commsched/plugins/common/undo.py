"""Undo: takes back the updates of a step that the ranks of an elastic job cannot finish. Shared by plugins."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from ...core.errors import ConfigError

Key = TypeVar("Key", bound=Hashable)

#: Larger parameters are not copied while another's average is awaited, which that copy could make late. In bytes.
COPIED_AHEAD = 4 << 20


class Undo(Generic[Key]):
    """Keeps the values that the last step's updates have replaced: those of each parameter, just before its update, or while
    the thread waits for an average before it (:meth:`copy_while`).

    So the copies cost no wait. They take as much memory as the parameters and the state of the optimizer. Without copies, it
    knows only whether there is a result: as long as no update of a step is begun, or when all of them are made.

    Updates of step k are only made once all ranks have contributed to step k, so all had the result of step k - 1 then.
    Copies for step k are only made once this rank has the result of step k - 1, to which it can then always go, and not further
    back. Therefore one step is enough.

    Between two sessions it keeps, with the same memory, a result while another rank's replaces it (:meth:`keep`).

    Args:
        save: returns a copy of what the update of the parameter ``key`` changes. Its second argument is an earlier copy, whose
            memory it may use, or None. ``save=None`` makes no copies.
        restore: puts such a copy in place.
    """

    def __init__(self, save: Callable[[Key, Any], Any] | None, restore: Callable[[Key, Any], None]) -> None:
        self._save = save
        self._restore = restore
        self._kept: dict[Key, tuple[int, Any]] = {}  # by parameter: the step of the update, and what it has replaced
        self._now = 0
        self._updating = 0
        self._begun = -1  # the step of the last update that was begun
        self._is_torn = False

    def begin_step(self, step: int) -> int:
        """The training loop begins ``step``. Updates of an earlier step may be outstanding. Return the number of steps whose
        result this rank may have to go back to, if not to the result of the steps before this one."""
        self._now = step
        return self._updating

    def committed(self) -> None:
        """The updates that are made from now on are those of the step that the loop is in. None is outstanding."""
        self._updating = self._now

    def before_update(self, keys: Iterable[Key]) -> None:
        """The parameters ``keys`` are about to be updated."""
        self._is_torn = True
        for key in keys:
            self._begun = self._updating
            self._copy(key)

    def copy_while(self, waits: Callable[[], bool], keys: Iterable[Key]) -> None:
        """Make copies for outstanding updates of ``keys``, one after another, as long as ``waits()``: in time that the thread
        would spend waiting for an average. Nothing else writes to these parameters before their update, nor to the optimizer's
        state for them."""
        for key in () if self._save is None else keys:
            if not waits():
                return
            self._copy(key)

    def _copy(self, key: Key) -> None:
        step, copied = self._kept.get(key, (-1, None))
        if step != self._updating and self._save is not None:
            self._kept[key] = self._updating, self._save(key, copied)

    def after_update(self) -> None:
        """The update is made."""
        self._is_torn = False

    def steps(self, is_outstanding: bool) -> int | None:
        """The most steps whose result this rank has or can go back to. None: it has made a part of a step, and no copies.
        ``is_outstanding``: there are outstanding updates."""
        if not (is_outstanding or self._is_torn or self._updating == self._now):
            return self._now
        return None if self._save is None and self._begun == self._updating else self._updating

    def take_back(self, steps: int) -> None:
        """Put the values in place that there were after ``steps`` steps."""
        for key, (step, copied) in self._kept.items():
            if step >= steps:
                self._restore(key, copied)
        self.begin_anew(steps)

    def keep(self, keys: Iterable[Key]) -> bool:
        """Another rank's values are about to replace those that :meth:`take_back` has put in place, all of which ``keys`` name.
        Until :meth:`begin_anew`, it can put them back once more. False: it makes no copies."""
        if self._save is None:
            return False
        for key in keys:
            self._kept[key] = self._updating, self._save(key, self._kept.get(key, (-1, None))[1])
        return True

    def begin_anew(self, steps: int) -> None:
        """All values are those after ``steps`` steps. Copies are of no use any more, but their memory is."""
        self._kept = {key: (-1, copied) for key, (_, copied) in self._kept.items()}
        self._now = self._updating = steps
        self._begun = -1
        self._is_torn = False


def require_no_undo(undo: Undo[Any] | None) -> None:
    """Raises ConfigError if an optimizer, whose ``undo`` it is, has an Elastic already."""
    if undo is not None:
        raise ConfigError("this optimizer has an Elastic already: make one, for one loop over its steps()")


def require_only_one(optimizers: int) -> None:
    """Raises ConfigError if an elastic job has several ``optimizers``, whose updates could not be taken back together."""
    if optimizers > 1:
        raise ConfigError(
            f"an elastic job may have one ScheduledOptimizer, and this one has {optimizers}: give the parameters of all models "
            "to one optimizer, or run without --elastic"
        )
