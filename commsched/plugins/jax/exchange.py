"""GradientExchange: what compiled programs call back to: gradients into the flat buffers, averages out of them.

A *round* is one exchange of all gradients. Rounds are counted from a number drawn at random, and states carry the number of the
round whose averages they have yet to apply, so that a state from elsewhere, or one that is used twice, is found out.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import commsched

from ...core.errors import UnsupportedError
from ...core.group import TensorGroup
from ...core.manifest import Manifest, TensorSpec
from ..flat import lay_out
from .registered import RegisteredGroups

_exchanges: weakref.WeakSet[GradientExchange] = weakref.WeakSet()
_adding = threading.Lock()

#: The number of no round: nothing is to be applied.
NOTHING = 0


class GradientExchange:
    """The gradients of ``specs``, of which :meth:`register` says the order.

    ``take_average``, ``begin`` and ``hand_over`` are called back by programs, from the engine's threads. None waits for the
    network but ``take_average``. What they raise is kept in ``failures``, since the engine makes a text of it.
    """

    def __init__(self, session: commsched.Session, specs: Sequence[TensorSpec]) -> None:
        self.session = session
        self.specs = tuple(specs)
        self.failures: deque[BaseException] = deque(maxlen=16)  # several callbacks may fail side by side
        self._first = int(session.gather(secrets.randbelow(2**30 - 1) + 1)[0])
        self._round = NOTHING
        self._group: TensorGroup | None = None
        self._tensors: dict[int, int] = {}  # place in specs -> index in the manifest
        self._views: list[NDArray[Any]] = []  # by place in specs
        self._lock = threading.Lock()
        self._timeline = _Timeline(session)
        with _adding:
            _exchanges.add(self)

    def register(self, order: Sequence[int]) -> None:
        """Agree on tensors in the forward order that rank 0 has measured; does nothing if that was done. Collective.

        Raises:
            ManifestMismatch: ranks disagree.
        """
        if self._group is not None:
            return
        order = self.session.gather(list(order))[0]
        manifest = Manifest(tuple(self.specs[place] for place in order))
        registered = RegisteredGroups.of(self.session)
        registered.release_unowned()
        buffers, views = lay_out(manifest, jnp.dtype)
        self._tensors = {place: tensor for tensor, place in enumerate(order)}
        self._views = [views[self._tensors[place]] for place in range(len(self.specs))]
        self._group = self.session.register(manifest, buffers)
        registered.add(self, self._group)

    # --- what programs call back to ---

    def take_average(self, place: int, round_number: int, into: NDArray[Any]) -> None:
        """Copy the average of that round to ``into``, once it is there; zeros if the number is that of none.

        Raises:
            UnsupportedError: the number is not of the last round.
            CommschedError: the session failed or was closed.
        """
        with self._keeping_errors():
            if round_number == NOTHING:
                into[...] = 0
                return
            self.require_last(round_number)
            self._timeline.layer_ends()
            self._copy_average(place, round_number, into)
            self._timeline.layer_begins(self.specs[place].name)

    def begin(self, round_number: int) -> int:
        """Begin the next round, with a state that has that round's averages applied; its number.

        Raises:
            UnsupportedError: that is neither the last round nor none.
            CommschedError: the session failed or was closed.
        """
        with self._keeping_errors(), self._lock:
            group = self._require_group()
            if round_number != NOTHING:
                self.require_last(round_number)
            elif self._round != NOTHING and len(group.notified) < len(self.specs):
                self._refuse_broken_off()
            self._timeline.backward_begins()
            step = group.begin_step()
            self._round = (self._first + step) % (2**31 - 1) or 1
            return self._round

    def hand_over(self, place: int, round_number: int, gradient: Any) -> None:
        """Put ``gradient`` into the buffer and tell the core: its average is on its way.

        Raises:
            UnsupportedError: another round has begun meanwhile.
            CommschedError: the session failed or was closed.
        """
        with self._keeping_errors(), self._lock:
            self.require_last(round_number)
            np.copyto(self._views[place], np.asarray(gradient))
            self._require_group().notify_ready(self._tensors[place])
            self._timeline.handed_over(self.specs[place].name)

    # --- outside of programs ---

    def averages(self, round_number: int) -> list[NDArray[Any]]:
        """Copies of all averages of that round; waits for them.

        Raises:
            UnsupportedError: the number is not of the last round.
            CommschedError: the session failed or was closed.
        """
        self.require_last(round_number)
        group = self._require_group()
        if len(group.notified) < len(self.specs):
            self._refuse_broken_off()
        copies = [np.empty_like(view) for view in self._views]
        for place, copy in enumerate(copies):
            self._copy_average(place, round_number, copy)
        return copies

    def _copy_average(self, place: int, round_number: int, into: NDArray[Any]) -> None:
        self._require_group().proxies[self._tensors[place]].wait()
        np.copyto(into, self._views[place])
        self.require_last(round_number)  # still: no gradient of another round can have been written over what was copied

    def require_last(self, round_number: int) -> None:
        """
        Raises:
            UnsupportedError: the number is not of the last round.
        """
        if round_number != self._round:
            raise UnsupportedError(
                "this state lacks an update whose averages are gone, or were never here: it was stepped from before, or the "
                "step from it was broken off, or it was saved without cs.synchronize(), or copied from another job. Step from "
                "each state once, and call state = cs.synchronize(state) on what is to be kept"
            )

    def _refuse_broken_off(self) -> None:
        group = self._require_group()
        missing = [spec.name for tensor, spec in enumerate(group.manifest.tensors) if tensor not in group.notified]
        raise UnsupportedError(
            f"step {group.step} was broken off: the gradient of '{missing[0]}' and {len(missing) - 1} more were never produced"
        )

    def _require_group(self) -> TensorGroup:
        if self._group is None:
            raise UnsupportedError("this state is of a training that has not begun in this process; make one with cs.create()")
        return self._group

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failures.append(error)
            raise


def take_failure(text: str) -> BaseException | None:
    """What a callback has raised, of which the engine made ``text``; once."""
    with _adding:
        exchanges = list(_exchanges)
    for exchange in exchanges:
        for failure in list(exchange.failures):
            words = f": {failure}" if str(failure) else ""
            if f"{type(failure).__name__}{words}" in text:
                exchange.failures.clear()
                return failure
    return None


class _Timeline:
    """Spans of the trace: between two gates forward works on the layer of the first, between two gradients backward on that of
    the second."""

    def __init__(self, session: commsched.Session) -> None:
        self._span: Callable[[str, str, float, float], None] | None = None
        if session.observer is not None:
            self._span = session.observer.on_span
        self._layer: str | None = None
        self._since = 0.0

    def layer_begins(self, name: str) -> None:
        if self._span is not None:
            self._layer, self._since = name, monotonic()

    def layer_ends(self) -> None:
        if self._span is not None and self._layer is not None:
            self._span("forward", self._layer, self._since, monotonic())
        self._layer = None

    def backward_begins(self) -> None:
        self.layer_ends()
        self._since = monotonic()

    def handed_over(self, name: str) -> None:
        if self._span is not None:
            self._span("backward", name, self._since, now := monotonic())
            self._since = now
