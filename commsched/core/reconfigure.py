"""Agreed changes of configuration on one rank: which steps are held, and with which configuration each step begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .group import TensorGroup
from .scheduler import SchedulerConfig


@dataclass
class _Change:
    """An agreed change. Each group applies it before its step in ``steps``. ``number`` counts the changes."""

    number: int
    config: SchedulerConfig
    steps: dict[int, int]


class Reconfiguration:
    """The state of one rank. Pure: no thread, lock, clock or I/O.

    While a change is being agreed on, each group begins no step from the one on that this rank has promised. When it is agreed
    on, each group applies it at its own step, so groups may use different configurations for a while. Groups that are added
    later use ``latest``.

    Attributes:
        latest: the configuration agreed on last.
        current: the newest configuration that a group has applied, or was added with, or that waits for no group.
        waiting: the changes that some group has yet to apply, by age.
        agreed_count: the number of changes agreed on.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.latest = self.current = config
        self.waiting: list[_Change] = []
        self._groups: dict[int, TensorGroup] = {}  # those that were not forgotten
        self._count = 0  # of all groups so far
        self._reserved = False
        self._holds: dict[int, int] | None = None  # the first held step of each group, while a change is being agreed on
        self.agreed_count = self._current_number = 0  # numbers of the last change and of the one that ``current`` comes from
        self._reserved_change = _Change(0, config, {})  # the one whose configuration the last reservation returned

    def reserve(self) -> SchedulerConfig:
        """The configuration to cut the next group by. Every later change includes that group. No steps may be held, since that
        change may not include the group."""
        self._reserved = True
        self._reserved_change = _Change(self.agreed_count, self.latest, {})
        return self.latest

    def cancel_reservation(self) -> None:
        """Note that the group that was reserved is not added. No change waits for it."""
        self._reserved = False
        for change in self.waiting:
            change.steps.pop(self._count, None)
        self._drop_empty()

    def add_group(self, group: TensorGroup) -> None:
        self._groups[group.index] = group
        self._count += 1
        self._reserved = False
        # The group may train while an older one, which has yet to apply the same change, never begins another step.
        self._adopt(self._reserved_change)

    def forget(self, group: int) -> None:
        """Forget ``group``, which was released."""
        self._groups.pop(group, None)

    @property
    def is_holding(self) -> bool:
        return self._holds is not None

    def hold(self) -> dict[int, int]:
        """Hold steps; see ``Core.hold_steps``."""
        self._holds = {group.index: group.next_step + 1 for group in self._groups.values() if not group.is_over}
        if self._reserved:
            self._holds[self._count] = 1
        return dict(self._holds)

    def is_held(self, group: TensorGroup) -> bool:
        """Whether ``group`` may not begin its next step now."""
        return self._holds is not None and group.next_step >= self._holds.get(group.index, 1)

    def agree(self, config: SchedulerConfig | None, steps: Mapping[int, int]) -> None:
        """Add a change and hold no step any more; see ``Core.switch_at``."""
        self._holds = None
        self.agreed_count += 1
        self.latest = config or self.latest
        change = _Change(self.agreed_count, self.latest, self.without_released(steps))
        for earlier in self.waiting:
            for group, step in change.steps.items():
                if earlier.steps.get(group) == step:  # the group begins no step with the earlier configuration
                    del earlier.steps[group]
        self.waiting = [earlier for earlier in self.waiting if earlier.steps]
        if change.steps:
            self.waiting.append(change)
        else:
            self._adopt(change)  # no group has steps to come: the change is for groups added later

    def begin_step(self, group: TensorGroup) -> SchedulerConfig | None:
        """The configuration by which to cut ``group`` anew for the step that it begins; None if its plan stays."""
        # Another rank may be a step ahead, so the next change can be agreed on before this rank has applied the last one.
        due = [change for change in self.waiting if group.next_step >= change.steps.get(group.index, group.next_step + 1)]
        for change in due:
            del change.steps[group.index]
            self._adopt(change)
        if due:
            self.waiting = [change for change in self.waiting if change.steps]
        return due[-1].config if due else None

    def without_released(self, steps: Mapping[int, int]) -> dict[int, int]:
        """The entries of ``steps`` for groups that may begin a step here, or that are not added yet."""
        return {group: step for group, step in steps.items() if self._has_steps(group)}

    def _has_steps(self, group: int) -> bool:
        known = self._groups.get(group)  # asked first: another thread may add the group meanwhile
        return group >= self._count if known is None else not known.is_over

    def drop_released(self) -> None:
        """Drop the changes that released groups would have applied."""
        for change in self.waiting:
            change.steps = self.without_released(change.steps)
        self._drop_empty()

    def _drop_empty(self) -> None:
        """Adopt the changes that no group has to apply any more."""
        for change in self.waiting:
            if not change.steps:
                self._adopt(change)
        self.waiting = [change for change in self.waiting if change.steps]

    def _adopt(self, change: _Change) -> None:
        if change.number > self._current_number:  # a group that lags behind must not bring back an older credit or policy
            self._current_number, self.current = change.number, change.config
