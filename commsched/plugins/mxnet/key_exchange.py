"""KeyExchange: averages for a kvstore, which is told of one key after another and of no end of a step.

In the first step each key is averaged by itself, while the caller waits: this shows which keys there are, and how urgent. The
first key that is pushed again registers them all as a group, and from then on averages are queued (see :mod:`.queued_group`).
No key shares a partition with another, so that a weight may be read when not all keys of its step have been pushed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np

import commsched

from ...core.errors import ClosedError, UnsupportedError
from ...core.manifest import Manifest, TensorSpec
from .agreement import Agreement, Done
from .ending import end_with
from .initial import gather_alike, require_alike
from .queued_group import QueuedGroup

_ADVICE = "push the same keys, in the same order, on all ranks"


class KeyExchange:
    """Of one kvstore; for the thread that trains."""

    def __init__(self, session: commsched.Session) -> None:
        self._session = session
        self._pid = os.getpid()
        self._specs: dict[str, TensorSpec] = {}  # in the order of the first step
        self._priorities: dict[str, int] = {}
        self._tensors: dict[str, int] = {}  # index in the group
        self._pushed: list[str] = []  # in this step
        self._queued: QueuedGroup | None = None
        self._agreement: Agreement | None = None
        self._done = Done()  # of the round begun last
        end_with(session, self)

    def average(
        self,
        spec: TensorSpec,
        priority: int,
        gradient: mx.nd.NDArray,
        done: Callable[[], Done],
        alike: Callable[[], Mapping[str, Any]],
    ) -> mx.nd.NDArray:
        """The array that will hold the average of ``gradient`` over all ranks: to be read and written by operations of MXNet
        that are queued now, before the next call for this key. Waits for other ranks in the first step, and at the beginning
        of each for the averages of the step before.

        Args:
            done: gives what is compared in each step.
            alike: gives what is compared when the key is pushed for the first time, by what it is called in an error; JSON.

        Raises:
            UnsupportedError: it is a new key, or another one was to be pushed before it, or ranks have parted.
            ManifestMismatch: ranks push other keys.
            CommschedError: the session failed or was closed.
        """
        if os.getpid() != self._pid:
            raise ClosedError("a forked process cannot average gradients")
        self._session.core.check()
        if spec.name not in self._specs:
            return self._average_alone(spec, priority, gradient, alike())
        if spec != self._specs[spec.name]:
            raise UnsupportedError(
                f"{self._specs[spec.name]} is {spec} now: create another kvstore for other parameters, on all ranks"
            )
        if self._queued is None:
            self._register()
        assert self._queued is not None
        assert self._agreement is not None
        if spec.name in self._pushed:
            self.require_all_pushed(f"{spec.name} is pushed again")
            self._pushed.clear()
        self._require_turn(spec.name)
        if not self._pushed:
            self._queued.settle()
            self._agreement.require()
            self._queued.begin_round()
            self._done = done()
            self._agreement.offer(self._done, (), ())
        self._pushed.append(spec.name)
        tensor = self._tensors[spec.name]
        self._queued.hand_over({tensor: gradient})
        return self._queued.places[tensor].array

    def require_all_pushed(self, what: str) -> None:
        """``what`` is about to be done.

        Raises:
            UnsupportedError: a step has begun, and a key was not pushed in it.
        """
        missing = [name for name in self._specs if name not in self._pushed]
        if self._pushed and missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UnsupportedError(
                f"{what}, and {missing[0]}{more} was not pushed in this step: push every key of the first step in each, on all "
                "ranks, or create another kvstore"
            )

    def _require_turn(self, name: str) -> None:
        """Where ranks push in other orders than each other, an operation that one rank has queued behind an update may keep it
        from computing a gradient that an update of another rank waits for, and the other way round: so all keep the order of
        the first step, which is the same on all.

        Raises:
            UnsupportedError: another key is next.
        """
        expected = list(self._specs)[len(self._pushed)]
        if name != expected:
            raise UnsupportedError(
                f"{name} is pushed before {expected}, and after it in the first step: push keys in the same order in each step"
            )

    # --- Ending ---

    def offer_end(self) -> None:
        self.require_all_pushed("the session is to be closed")
        if self._queued is not None and self._agreement is not None:
            self._queued.settle()
            self._agreement.require()
            self._agreement.offer(replace(self._done, ends=1), (), ())

    @property
    def end_is_known(self) -> bool:
        return self._agreement is None or self._agreement.is_known

    def require_end(self) -> None:
        if self._agreement is not None:
            self._agreement.require()

    # ---

    def _average_alone(
        self, spec: TensorSpec, priority: int, gradient: mx.nd.NDArray, alike: Mapping[str, Any]
    ) -> mx.nd.NDArray:
        if self._queued is not None:
            raise UnsupportedError(
                f"{spec.name} is pushed since the second step only: push every key in the first, or create another kvstore"
            )
        same = {"the shape and type": str(spec), "the priority": priority, **alike}
        require_alike(spec.name, gather_alike(self._session, f"pushes {spec.name} for the first time", same, _ADVICE))
        array = np.array(gradient.asnumpy(), order="C")
        self._session.average(spec, array.reshape(-1).view(np.uint8).data)
        self._specs[spec.name], self._priorities[spec.name] = spec, priority
        return mx.nd.from_numpy(array)

    def _register(self) -> None:
        gather_alike(self._session, "begins its second step", None, _ADVICE)
        urgent_first = sorted(self._specs, key=lambda name: -self._priorities[name])  # stable: those of one keep their order
        self._tensors = {name: tensor for tensor, name in enumerate(urgent_first)}
        specs = tuple(self._specs[name] for name in urgent_first)
        self._queued = QueuedGroup(self._session, Manifest(specs, shares_partitions=False))
        self._agreement = Agreement(self._session, ())
