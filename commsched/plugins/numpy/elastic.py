"""The part of a ScheduledOptimizer that ``commsched.Elastic`` uses: it leaves a session, undoes updates, joins another."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

import commsched

from ...core.interfaces import Buffer
from ..common.undo import Undo, require_no_undo, require_only_one
from ..common.weights_check import count_in

if TYPE_CHECKING:
    from ...session.elastic import Keep
    from .plugin import ScheduledOptimizer


class ElasticPart:
    """See ``ElasticPart`` in ``session/elastic.py``. It uses what ``optimizer`` keeps to itself otherwise."""

    def __init__(self, optimizer: ScheduledOptimizer) -> None:
        self._of = optimizer

    @property
    def session(self) -> commsched.Session:
        return self._of._session

    def synchronize(self) -> None:
        self._of.synchronize()

    def begin_undo(self, keep: Keep) -> None:
        require_no_undo(self._of._undo)
        self._is_apart = keep == "cpu" and self._of._device is not None  # copies are not where the values are
        self._undo = self._of._undo = Undo(None if keep == "nothing" else self._saved, self._restore)

    def begin_step(self, step: int) -> int:
        if self.session.place is not None:
            require_only_one(count_in(self.session))
        return self._undo.begin_step(step)

    def note(self) -> Any:
        return self.hyper_parameters()

    def leave(self) -> int | None:
        steps = self._undo.steps(is_outstanding=bool(self._of._due))
        self._of._due.clear()
        self._of._network.around_forward = self._of._network.around_backward = nullcontext
        return steps

    def go_back(self, steps: int, noted: Any) -> None:
        self._undo.take_back(steps)
        self.set_hyper_parameters(noted)

    def keep(self) -> bool:
        return self._undo.keep(range(len(self._of._network.layers)))

    def move(self, session: commsched.Session) -> None:
        self._of._take_part(session)

    def begin_anew(self, steps: int) -> None:
        self._undo.begin_anew(steps)

    def hyper_parameters(self) -> Any:
        sgd = self._of._optimizer
        return {"learning_rate": float(sgd.learning_rate), "momentum": float(sgd.momentum)}

    def set_hyper_parameters(self, values: Any) -> None:
        sgd = self._of._optimizer
        sgd.learning_rate, sgd.momentum = values["learning_rate"], values["momentum"]

    def load(self, each: Any, state: dict[str, Any]) -> None:
        each.load_state_dict(state)

    def _arrays(self, layer: int) -> list[NDArray[Any]]:
        return [*self._of._network.layers[layer].parameters.values(), *self._of._optimizer.velocities[layer].values()]

    def _saved(self, layer: int, memory: list[Any] | None) -> list[Any]:
        arrays = self._arrays(layer)
        if self._is_apart:
            copies = memory or [self._of._device.allocate_host(array.nbytes) for array in arrays]  # type: ignore[union-attr]
            self._copy((copied, self._of._bytes_of(array, "")) for copied, array in zip(copies, arrays))
            return copies
        if memory is None:
            return [array.copy() for array in arrays]
        for copied, array in zip(memory, arrays):
            copied[...] = array
        return memory

    def _restore(self, layer: int, saved: list[Any]) -> None:
        arrays = self._arrays(layer)
        if self._is_apart:
            self._copy((self._of._bytes_of(array, ""), values) for array, values in zip(arrays, saved))
            return
        for array, values in zip(arrays, saved):
            array[...] = values

    def _copy(self, pairs: Iterable[tuple[Buffer, Buffer]]) -> None:
        """Copy between the host and the device, in order with what computes there, and wait for that."""
        stream = self._of._stream()
        assert stream is not None
        for target, source in pairs:
            stream.copy(target, source)
        stream.synchronize()
