"""The layout of the flat buffers: which parameters' gradients travel, where they lie, and in which order; and the end of the
registered groups when the model is no longer referenced."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

import commsched

from ...core.comparison import Difference, require_same
from ...core.errors import CommschedError, ConfigError
from ...core.group import TensorGroup
from ...core.manifest import Manifest, require_equal
from ..common.weights_check import number_in
from .agreement import Flags
from .checks import refuse_wrapping
from .device import Device, open_device
from .guard import release
from .slot import Slot, give_places
from .timing import FirstUse

#: The Registered objects of collected exchanges, by session, until a training thread ends them.
_abandoned: WeakKeyDictionary[commsched.Session, deque[Registered]] = WeakKeyDictionary()

#: The layout that owns each parameter, by the parameter's id. The owner keeps the parameter alive.
_owners: WeakValueDictionary[int, GradientLayout] = WeakValueDictionary()

#: Held by the thread that makes the buffers of an optimizer, because another thread of this rank may have the first gradients
#: of another optimizer at the same time.
_first_gradients: WeakKeyDictionary[commsched.Session, threading.Lock] = WeakKeyDictionary()

_refuse_wrapping = cache(lambda: refuse_wrapping(_owners))  # once per process


class Registered:
    """The groups and flat buffers of one exchange. It refers neither to the exchange nor to parameters, and outlives them.

    A dropped model is collected at a different time on each rank, in any thread, between any two instructions. Therefore
    :meth:`abandon` takes no lock and does not wait. :meth:`end`, later, is not collective: outstanding averages need nothing
    more from this rank, and the open round gets zeros, with flags that say that this rank does not commit. Through these flags
    ranks that still train the model get an error.
    """

    def __init__(self, session: commsched.Session, device: Device) -> None:
        self.device = device
        self._views: dict[TensorGroup, Iterable[torch.Tensor]] = {}
        if session not in _abandoned:
            _abandoned[session] = deque()
            session.on_close(partial(end_abandoned, session))
            session.cleanup.callback(_abandoned[session].clear)
        self._queue = _abandoned[session]

    def add(self, group: TensorGroup, views: Iterable[torch.Tensor]) -> None:
        self._views[group] = views

    def release(self, group: TensorGroup) -> None:
        """Release ``group``. No average of it may be outstanding."""
        del self._views[group]
        group.release()

    def close(self) -> None:
        """Release all groups and close the device. No average may be outstanding."""
        for group in tuple(self._views):
            self.release(group)
        self.device.close()

    def abandon(self) -> None:
        """Queue this object for :meth:`end`, because the exchange is gone. Groups without a
        missing gradient free their memory at once. A finalizer may call it."""
        for group in self._views:
            if not group.missing():
                group.free_memory()
                self._views[group] = ()
        self._queue.append(self)

    def end(self) -> None:
        """Submit zeros for all missing tensors and release the groups. Call it from a training thread. It waits only for the
        device."""
        with suppress(CommschedError):  # the job has failed, and the session releases the rest
            self.device.settle()
            for group, views in self._views.items():
                missing = set(group.missing())
                for tensor, view in enumerate(views):
                    if tensor in missing:
                        view.zero_()
                        self.device.when_written(partial(group.notify_ready, tensor))
            self.device.settle()
            self.close()


def end_abandoned(session: commsched.Session) -> None:
    """End the groups of all exchanges that were collected by now. Call it from a training thread. Not collective."""
    queue = _abandoned.get(session, ())
    while queue:
        queue.popleft().end()


def layouts_in(session: commsched.Session) -> int:
    """The number of layouts that have parameters in ``session``."""
    return len({id(owner) for owner in _owners.values() if owner._session is session})


class GradientLayout:
    """Owns the flat buffers. One group holds the parameters that require a gradient from the start, in the order of their first
    use. Each set of parameters that gets its places later has another group.

    Its methods are collective, unless their docstring says otherwise.

    Args:
        end: called with the name of a parameter, on all ranks, when another optimizer is made for it. It must release this
            layout.

    Raises:
        ManifestMismatch: the ranks' parameters differ.
        ConfigError: a parameter belongs to an earlier ScheduledOptimizer on some ranks only.
        UnsupportedError: the type or device of a parameter is not supported.
    """

    def __init__(
        self, session: commsched.Session, model: torch.nn.Module, slots: Sequence[Slot], end: Callable[[str], None]
    ) -> None:
        self.slots = [slot for slot in slots if slot.parameter.requires_grad]  # with a place, once the buffers exist
        self.late = [slot for slot in slots if not slot.parameter.requires_grad]  # without a place
        self.all: list[Slot] = []  # by flag
        self.groups: list[TensorGroup] = []
        self.number, self.label = number_in(session)
        self._session = session
        self._model = model
        self._flags: Flags | None = None
        self._end = end
        # Describes the gradients as they will be registered; all ranks' must be equal before anything else is exchanged.
        manifest = Manifest(tuple(spec for slot in self.slots for spec in slot.specs()))
        self.device = open_device(session, [(slot.name, slot.parameter) for slot in self.slots or slots])
        self.registered = Registered(session, self.device)
        owners = [_owners.get(id(slot.parameter)) for slot in self.slots]
        earlier = list(dict.fromkeys(owner for owner in owners if owner is not None))
        owned = [-1 if owner is None else earlier.index(owner) for owner in owners]
        record = {"manifest": manifest.to_record(), "frozen": _described(self.late), "owned": owned}
        records = session.gather(record, "to make a ScheduledOptimizer")
        require_equal([Manifest.from_record(record["manifest"]) for record in records])
        require_same([record["frozen"] for record in records], _other_parameter)
        require_same([record["owned"] for record in records], partial(_other_owner, self.slots), ConfigError)
        for place, owner in enumerate(earlier):
            owner._end(self.slots[owned.index(place)].name)
        self._claim(self.slots)
        _refuse_wrapping()
        self._give_flags(slots)

    def _give_flags(self, slots: Sequence[Slot]) -> None:
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
        """Record from now on the order in which the parameters are first used. Not collective."""
        self.use_order = FirstUse(self.slots, self.device)

    @property
    def flags(self) -> Flags:
        """The flags. The first access makes them and the buffers. This is at the first gradient, when the forward of rank 0 has
        shown the order of the layers."""
        if self._flags is None:
            with _first_gradients.setdefault(self._session, threading.Lock()):
                record = {"optimizer": self.number, "order": self.use_order.order()}
                records = self._session.gather(record, "to send the first gradients")
                require_same([record["optimizer"] for record in records], _other_optimizer, ConfigError)
                self.slots = [self.all[flag] for flag in records[0]["order"]]
                if self.slots:
                    self._give(self.slots)
                self._make_flags()
        assert self._flags is not None
        return self._flags

    def _give(self, slots: list[Slot]) -> TensorGroup:
        group, views = give_places(self._session, self.device, slots)
        self.registered.add(group, views)
        self.groups.append(group)
        return group

    def _make_flags(self) -> None:
        self._flags = Flags(self._session, self.device, len(self.all))
        for group, views in self._flags.registered:
            self.registered.add(group, views)

    @property
    def are_made(self) -> bool:
        """Whether the buffers exist, that is, whether a round has begun. Not collective."""
        return self._flags is not None

    def add(self, slots: Sequence[Slot]) -> None:
        """Add further parameters of the optimizer, in the same order on all ranks. They have no place yet."""
        require_same(self._session.gather(_described(slots)), _other_parameter)
        self.late += slots
        self._give_flags(slots)
        if self._flags is not None:
            self._flags.settle()
            for group, _ in self._flags.registered:
                self.registered.release(group)
            self._make_flags()

    def give(self, late: list[Slot]) -> TensorGroup:
        """Give a place to each of ``late``, parameters that have none, and return their new group."""
        self._claim(late)
        group = self._give(late)
        self.late = [slot for slot in self.late if not slot.proxies]
        self.slots += late
        return group

    def drop(self) -> None:
        """Release the parameters from a session that has ended. Not collective."""
        self._release_tensors()
        with suppress(CommschedError):
            self.registered.close()

    def _release_tensors(self) -> None:
        for slot in self.all:
            if _owners.get(id(slot.parameter)) is self:
                del _owners[id(slot.parameter)]
            release(slot.gradient)
            release(slot.parameter)

    def release(self) -> None:
        """Release the buffers and the parameters. No average or update may be outstanding."""
        self._release_tensors()
        if self._flags is not None:
            self._flags.settle()
        self.registered.close()

    @property
    def manifests(self) -> list[Manifest]:
        """The registered manifests. The first one has the parameters that required a gradient from the start, in forward
        order."""
        return [group.manifest for group in self.groups]

    def unaveraged(self) -> str | None:
        """The name of a parameter of the model that requires a gradient which no optimizer averages, if any. Not collective."""
        ours = {id(slot.parameter) for slot in self.all} | set(_owners)
        return next(
            (name for name, each in self._model.named_parameters() if each.requires_grad and id(each) not in ours), None
        )


def _described(slots: Sequence[Slot]) -> list[list[object]]:
    """Each slot's parameter (name, shape, type, whether it is sparse) as JSON."""
    return [[slot.name, list(slot.parameter.shape), str(slot.parameter.dtype), slot.is_sparse] for slot in slots]


def _other_parameter(different: Difference) -> str:
    return f"the optimizer has parameter {different.text()}"


def _other_owner(slots: Sequence[Slot], different: Difference) -> str:
    """The message if ranks cannot end earlier ScheduledOptimizers together. The items are the number of the one that has the
    slot's parameter, or -1 if none has it."""
    owners = different.text(lambda owner: "an earlier ScheduledOptimizer" if owner >= 0 else "no other one")
    return f"parameter '{slots[different.key].name}' belongs to {owners}; call detach() on all ranks, or on none"


def _other_optimizer(different: Difference) -> str:
    """The message if ranks would average gradients of different models."""
    return (
        f"the first gradients are those of ScheduledOptimizer {different.text()}: the first backward of each must come in the "
        "same order on all ranks. If several threads train a model each, make the first backward of each in one thread. If one "
        "model has several optimizers, use all its parameters in the first backward on every rank"
    )
