"""The groups that an exchange has registered with its session, and their end when the model is no longer referenced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

import torch

import commsched

from ...core.errors import CommschedError
from ...core.group import TensorGroup
from .device import Device

#: The Registered objects of collected exchanges, by session, until a training thread ends them.
_abandoned: WeakKeyDictionary[commsched.Session, deque[Registered]] = WeakKeyDictionary()


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
