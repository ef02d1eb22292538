"""GradientExchange: the callbacks of compiled programs, which copy gradients into the flat buffers and averages out of them.

A *round* is one exchange of all gradients. Round numbers start at a random number. A state carries the number of the round
whose averages it has yet to apply. A state from another job, or a state that is used twice, is therefore detected.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import commsched

from ...core.device import Device
from ...core.errors import UnsupportedError, error_text
from ...core.manifest import Manifest, TensorSpec
from ..common.collectives import gather_alike
from ..common.step_flags import StepFlags
from ..common.weights_check import WeightsCheck, digest_of, number_in
from .memory import DeviceGradients, FlatGradients, HostGradients, bytes_of
from .registered import RegisteredGroups

_exchanges: weakref.WeakSet[GradientExchange] = weakref.WeakSet()
_adding = threading.Lock()

#: Stands for no round: there are no averages to apply.
NOTHING = 0

TRAINING_ADVICE = "make the same trainings, and their first steps, in the same order on all ranks"


class GradientExchange:
    """Exchanges the gradients of ``specs``, in the order given to :meth:`register`.

    Programs call back ``take_average``, ``begin`` and ``submit``, from the engine's threads. Only ``take_average`` waits for
    the network. Their errors are kept in ``failures``, since the engine reduces an error to text. With ``makes_update`` the
    caller makes the update, so it knows what of the optimizer must be equal on all ranks. ``device`` is where the gradients
    lie; None is the host's memory.
    """

    def __init__(
        self,
        session: commsched.Session,
        specs: Sequence[TensorSpec],
        device: Device | None,
        makes_update: bool = False,
    ) -> None:
        self.session = session
        self._makes_update = makes_update
        self._device = device
        self.specs = tuple(specs)
        self.failures: deque[BaseException] = deque(maxlen=16)  # several callbacks may fail concurrently
        self._first = gather_alike(session, "begins a training", secrets.randbelow(2**30 - 1) + 1, TRAINING_ADVICE)[0]
        self._round = NOTHING
        self._gradients: FlatGradients | None = None
        self._tensors: dict[int, int] = {}  # place in specs -> index in the manifest
        self._flags: StepFlags | None = None  # for the numbers of the optimizer, if they are compared
        self._lock = threading.Lock()
        self._timeline = _Timeline(session)
        _, of_which = number_in(session, "training")
        self._optimizers = "optimizers" + of_which
        self._check = WeightsCheck(
            session, [spec.name for spec in specs], [spec.nbytes for spec in specs], "weights" + of_which
        )
        with _adding:
            _exchanges.add(self)

    @property
    def compares(self) -> bool:
        """Whether parameters and optimizers are compared between ranks in some steps."""
        return self.session.check_weights > 0

    @property
    def is_registered(self) -> bool:
        return self._gradients is not None

    def register(self, order: Sequence[int]) -> None:
        """Register the tensors in rank 0's ``order``, which should be the forward order. Call it once. Collective. Raises
        ManifestMismatch if ranks disagree."""
        order = gather_alike(self.session, "traces its first step", list(order), TRAINING_ADVICE)[0]
        manifest = Manifest(tuple(self.specs[place] for place in order))
        registered = RegisteredGroups.of(self.session)
        registered.release_unowned()
        gradients: FlatGradients
        if self._device is None:
            gradients = HostGradients(self.session, manifest)
        else:
            gradients = DeviceGradients(self.session, manifest, self._device)
        self._tensors = {place: tensor for tensor, place in enumerate(order)}
        if self._makes_update and self.compares:
            self._flags = StepFlags(self.session, "optimizer", self._optimizers)
            registered.add(self, self._flags.group)
        self._gradients = gradients
        registered.add(self, gradients.group)

    # --- callbacks of programs ---

    def take_average(self, place: int, round_number: int, into: Any) -> None:
        """Wait for the average of that round and copy it to ``into``. For ``NOTHING``, write zeros at once. Raises
        UnsupportedError if ``round_number`` is not the last round's, and CommschedError if the session failed or was closed."""
        with self._keeping_errors():
            if round_number == NOTHING:
                into[...] = 0
                return
            self.require_last(round_number)
            self._timeline.layer_ends()
            self._copy_average(place, round_number, into)
            self._timeline.layer_begins(self.specs[place].name)

    def begin(self, round_number: int, optimizer: Callable[[], Mapping[str, Any]] | None = None) -> int:
        """Begin the next round, from a state to which the averages of ``round_number`` are applied. Returns the new number.

        ``optimizer`` returns values that must be equal on all ranks before the averages of this round are used. It is called if
        they are compared. Raises UnsupportedError if ``round_number`` is neither the last round's nor ``NOTHING``, or the last
        round was broken off, and CommschedError if the session failed or was closed.
        """
        with self._keeping_errors(), self._lock:
            group = self._require_gradients().group
            if round_number != NOTHING:
                self.require_last(round_number)
            elif self._round != NOTHING:
                group.require_whole_step()
            self._timeline.backward_begins()
            step = group.begin_step()
            self._round = (self._first + step) % (2**31 - 1) or 1
            checks = step > 0 and self._check.begin(step - 1)
            if self._flags is not None and optimizer is not None:
                numbers = optimizer()
                self._flags.offer(numbers)
                if checks:  # before the weights, so that an error names the optimizer that made them different
                    self.session.compare(self._optimizers, step - 1, numbers)
            return self._round

    def submit(self, place: int, round_number: int, gradient: Any, parameter: Any = None) -> None:
        """Copy ``gradient`` into the flat buffer and notify the core that it is ready.

        ``parameter``, from which the gradient was computed, is compared between ranks in some steps. Raises UnsupportedError if
        another round has begun meanwhile, and CommschedError if the session failed or was closed.
        """
        with self._keeping_errors():
            with self._lock:
                self.require_last(round_number)
                self._require_gradients().submit(self._tensors[place], gradient)
                self._timeline.submitted(self.specs[place].name)
                part = self._check.wanted(place)
            if parameter is not None and part is not None:
                digest = digest_of(bytes_of(parameter, *part))
                with self._lock:
                    self._check.add(place, digest)

    # --- outside of programs ---

    def averages(self, round_number: int) -> list[NDArray[Any]]:
        """Wait for all averages of that round and return copies of them.

        All its gradients are submitted, because a program returns a round's number only then. Raises UnsupportedError if
        ``round_number`` is not the last round's, and CommschedError if the session failed or was closed.
        """
        self.require_last(round_number)
        copies = [np.empty(spec.shape, jnp.dtype(spec.dtype)) for spec in self.specs]
        for place, copy in enumerate(copies):
            self._copy_average(place, round_number, copy)
        return copies

    def _copy_average(self, place: int, round_number: int, into: Any) -> None:
        gradients = self._require_gradients()
        if self._flags is not None:
            self._flags.require_same()
        gradients.read(self._tensors[place], into)
        self.require_last(round_number)  # again: then no gradient of a later round has overwritten the average meanwhile

    def require_last(self, round_number: int) -> None:
        """Require the number of the last round. Raises UnsupportedError if ``round_number`` is another."""
        if round_number != self._round:
            raise UnsupportedError(
                "this state lacks an update whose averages are gone, or were never here: it was stepped from before, or the "
                "step from it was broken off, or it was saved without cs.synchronize(), or copied from another job. Step from "
                "each state once, and call state = cs.synchronize(state) on a state that you keep. To leave out an update that "
                "is not finite, use optax.apply_if_finite(tx, ...)"
            )

    def _require_gradients(self) -> FlatGradients:
        if self._gradients is None:
            raise UnsupportedError("this state is of a training that has not begun in this process; make one with cs.create()")
        return self._gradients

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failures.append(error)
            raise


def take_failure(text: str) -> BaseException | None:
    """Return and forget the callback's error that the engine reduced to ``text``; None if there is no such error."""
    with _adding:
        exchanges = list(_exchanges)
    for exchange in exchanges:
        for failure in list(exchange.failures):
            if error_text(failure) in text:
                with suppress(ValueError):  # another thread has taken it, whose program failed in the same words
                    exchange.failures.remove(failure)
                return failure
    return None


class _Timeline:
    """Spans of the trace. Between two waits for averages, forward works on the layer of the first. Between two gradients,
    backward works on the layer of the second."""

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

    def submitted(self, name: str) -> None:
        if self._span is not None:
            self._span("backward", name, self._since, now := monotonic())
            self._since = now
