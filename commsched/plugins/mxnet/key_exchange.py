"""KeyExchange: averages for a kvstore, which receives one key after another and is not notified of the end of a step.

In the first step each key is averaged by itself, while the caller waits. This step shows the keys and their priorities. The
first key that is pushed again registers all keys as a group. From then on averages are queued (see :mod:`.queued_group`). No
key shares a partition with another key, so a weight can be read before all keys of its step have been pushed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mxnet as mx
import numpy as np

import commsched

from ...core.comparison import require_same
from ...core.errors import UnsupportedError, and_more
from ...core.manifest import Manifest, TensorSpec
from ..common.collectives import gather_alike
from ..common.weights_check import number_in
from .agreement import RoundOutcome
from .rounds import RoundExchange, Rounds

_ADVICE = "push the same keys, in the same order, on all ranks"


class KeyExchange(RoundExchange):
    """Averages the gradients of one kvstore. Call it from the training thread only."""

    def __init__(self, session: commsched.Session) -> None:
        super().__init__(session)
        self._specs: dict[str, TensorSpec] = {}  # in the order of the first step
        self._priorities: dict[str, int] = {}
        self._tensors: dict[str, int] = {}  # index of each key's tensor in the group
        self._pushed: list[str] = []  # keys that were pushed in this step
        self._updated: dict[str, mx.nd.NDArray] = {}
        self.end_with_session()

    def average(
        self,
        spec: TensorSpec,
        priority: int,
        gradient: mx.nd.NDArray,
        weight: mx.nd.NDArray | None,
        done: Callable[[], RoundOutcome],
        alike: Callable[[], Mapping[str, Any]],
    ) -> mx.nd.NDArray:
        """Return the array that will hold the average of ``gradient`` over all ranks.

        MXNet operations that read or write the array must be queued before the next call for this key. Waits for the other
        ranks in the first step. At the beginning of each later step, waits for the averages of the step before.

        Args:
            weight: the weight that is updated with the average. ``None`` means that it is unknown.
            done: returns the record that is compared in each step.
            alike: returns the values, as JSON, that are compared when the key is pushed for the first time. The keys are the
                names that an error gives to the values.

        Raises:
            UnsupportedError: the key was not pushed in the first step, its shape or type changed, or another key is next.
            RanksDiverged: ranks did different things, or their weights differ.
            ManifestMismatch: ranks push different keys.
            CommschedError: the session failed or was closed.
        """
        self._session.core.check()
        if spec.name not in self._specs:
            return self._average_alone(spec, priority, gradient, alike())
        if spec != self._specs[spec.name]:
            raise UnsupportedError(
                f"{self._specs[spec.name]} is {spec} now: create another kvstore for other parameters, on all ranks"
            )
        rounds = self._rounds = self._rounds or self._register()
        if spec.name in self._pushed:
            self.require_all_pushed(f"{spec.name} is pushed again")
            self._pushed.clear()
        self._require_turn(spec.name)
        if not self._pushed:
            rounds.settle()
            if len(self._updated) == len(self._specs):
                rounds.weights.take(rounds.queued.round, [self._updated[name] for name in self._tensors])
            rounds.queued.begin_round()
            self.done = done()
            self.offer(rounds, self.done)
        self._pushed.append(spec.name)
        if weight is not None:
            self._updated[spec.name] = weight
        tensor = self._tensors[spec.name]
        rounds.queued.submit({tensor: gradient})
        return rounds.queued.places[tensor].array

    def require_all_pushed(self, what: str) -> None:
        """Require that no step is incomplete. ``what`` names the reason in the error. Raises UnsupportedError if a step has
        begun, and a key was not pushed in it."""
        missing = [name for name in self._specs if name not in self._pushed]
        if self._pushed and missing:
            raise UnsupportedError(
                f"{what}, and {missing[0]}{and_more(len(missing) - 1)} was not pushed in this step: push every key of the "
                "first step in each, on all ranks, or create another kvstore"
            )

    def _require_turn(self, name: str) -> None:
        """Require that ``name`` is the next key in the order of the first step, which is the same on all ranks.

        Different orders can deadlock. An operation that rank A has queued behind an update may block the computation of a
        gradient that an update of rank B waits for, while rank B blocks rank A in the same way. Raises UnsupportedError if
        another key is next.
        """
        expected = list(self._specs)[len(self._pushed)]
        if name != expected:
            raise UnsupportedError(
                f"{name} is pushed before {expected}, and after it in the first step: push keys in the same order in each "
                f"step; if {expected} is not pushed any more, since its parameter is frozen, make another Trainer"
            )

    def offer_end(self) -> None:
        self.require_all_pushed("the session is to be closed")
        super().offer_end()

    def _average_alone(
        self, spec: TensorSpec, priority: int, gradient: mx.nd.NDArray, alike: Mapping[str, Any]
    ) -> mx.nd.NDArray:
        if self._rounds is not None:
            raise UnsupportedError(
                f"{spec.name} is pushed since the second step only: push every key in the first, or create another kvstore"
            )
        same = {"the shape and type": str(spec), "the priority": priority, **alike}
        records = gather_alike(self._session, f"pushes {spec.name} for the first time", same, _ADVICE)
        require_same(records, lambda different: f"{spec.name}: {different.key} is {different.text()}")
        array = np.array(gradient.asnumpy(), order="C")
        self._session.average(spec, array.reshape(-1).view(np.uint8).data)
        self._specs[spec.name], self._priorities[spec.name] = spec, priority
        return mx.nd.from_numpy(array)

    def _register(self) -> Rounds:
        gather_alike(self._session, "begins its second step", None, _ADVICE)
        number, _ = number_in(self._session, "kvstore")  # equal on all ranks, because this call is collective
        urgent_first = sorted(self._specs, key=lambda name: -self._priorities[name])  # stable: equal ones keep their order
        self._tensors = {name: tensor for tensor, name in enumerate(urgent_first)}
        specs = tuple(self._specs[name] for name in urgent_first)
        what = f"kvstore {number} ({next(iter(self._specs))}{and_more(len(self._specs) - 1)})"
        # A loop may read a weight before it pushes other keys, which would wait for ever in a static order.
        return Rounds(self._session, what, Manifest(specs, shares_partitions=False), (), may_freeze=False)
