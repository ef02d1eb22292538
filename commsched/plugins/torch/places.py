"""Places: which parameters of the optimizer travel, and where in the flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from weakref import WeakValueDictionary

import torch

import commsched

from ...core.errors import ConfigError
from ...core.group import TensorGroup
from ...core.manifest import Manifest, require_equal
from .agreement import describe, require_equal_parameters
from .device import open_device
from .first_use import FirstUse
from .flags import Flags
from .guard import release
from .plain import refuse_wrapping
from .slot import Slot, give_places

#: By id of parameter, which its owner keeps alive.
_owners: WeakValueDictionary[int, Places] = WeakValueDictionary()

_refuse_wrapping = cache(lambda: refuse_wrapping(_owners))  # once per process


class Places:
    """Owns the flat buffers: one group for what requires a gradient from the start, in the order of its first use, and one for
    each set of parameters that gets its places later.

    Collective, unless it says otherwise.

    Raises:
        ManifestMismatch: the ranks' parameters differ.
        ConfigError: a parameter belongs to another ScheduledOptimizer.
        UnsupportedError: the type or device of a parameter.
    """

    def __init__(self, session: commsched.Session, model: torch.nn.Module, slots: Sequence[Slot]) -> None:
        self.slots = [slot for slot in slots if slot.parameter.requires_grad]  # that have a place, once there are buffers
        self.late = [slot for slot in slots if not slot.parameter.requires_grad]  # without a place
        self.all: list[Slot] = []  # by flag
        self.groups: list[TensorGroup] = []
        self._session = session
        self._model = model
        self._flags: Flags | None = None
        # The model as it is registered; every rank's must be equal before anything else is exchanged.
        manifest = Manifest(tuple(spec for slot in self.slots for spec in slot.specs()))
        self.device = open_device(session, [(slot.name, slot.parameter) for slot in self.slots or slots])
        records = session.gather({"manifest": manifest.to_record(), "frozen": describe(self.late)})
        require_equal([Manifest.from_record(record["manifest"]) for record in records])
        require_equal_parameters([record["frozen"] for record in records])
        self._claim(self.slots)
        _refuse_wrapping()
        self._number(slots)

    def _number(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            slot.flag = len(self.all)
            self.all.append(slot)

    def _claim(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if _owners.get(id(slot.parameter), self) is not self:
                raise ConfigError(
                    f"parameter '{slot.name}' belongs to another ScheduledOptimizer; call that one's detach() first"
                )
        for slot in slots:
            _owners[id(slot.parameter)] = self

    def record_first_use(self) -> None:
        """From now on, note which parameter is used first, second, ... Not collective."""
        self.use_order = FirstUse(self.slots, self.device)

    @property
    def flags(self) -> Flags:
        """With the buffers, made at the first gradient, when rank 0's forward has shown the order of the layers."""
        if self._flags is None:
            order = self._session.gather(self.use_order.order())[0]
            self.slots = [self.all[flag] for flag in order]
            if self.slots:
                self.groups.append(give_places(self._session, self.device, self.slots))
            self._flags = Flags(self._session, self.device, len(self.all))
        return self._flags

    @property
    def are_made(self) -> bool:
        """Whether there are buffers: the ranks have been together in a round. Not collective."""
        return self._flags is not None

    def add(self, slots: Sequence[Slot]) -> None:
        """Further parameters of the optimizer, in the same order on all ranks; they have no place yet."""
        require_equal_parameters(self._session.gather(describe(slots)))
        self.late += slots
        self._number(slots)
        if self._flags is not None:
            self._flags.release()
            self._flags = Flags(self._session, self.device, len(self.all))

    def give(self, late: list[Slot]) -> TensorGroup:
        """Places for some of those that have none."""
        self._claim(late)
        group = give_places(self._session, self.device, late)
        self.groups.append(group)
        self.late = [slot for slot in self.late if not slot.proxies]
        self.slots += late
        return group

    def release(self) -> None:
        """Let go of the buffers, and of the parameters; nothing is outstanding."""
        for slot in self.all:
            if _owners.get(id(slot.parameter)) is self:
                del _owners[id(slot.parameter)]
            release(slot.gradient)
            release(slot.parameter)
        for group in self.groups:
            group.release()
        if self._flags is not None:
            self._flags.release()
        self.device.close()

    @property
    def manifests(self) -> list[Manifest]:
        """What was registered, in forward order; first those that required a gradient from the start."""
        return [group.manifest for group in self.groups]

    def unaveraged(self) -> str | None:
        """The name of a parameter of the model that has gradients, but of this rank only. Not collective."""
        ours = {id(slot.parameter) for slot in self.all} | set(_owners)
        return next(
            (name for name, each in self._model.named_parameters() if each.requires_grad and id(each) not in ours), None
        )
