"""Measurements in MXNet's engine: in the first backward, the order in which forward uses the parameters; for the trace, the
forward span of each block that has parameters of its own.

A hybridized network is one call in Python, and a network that is not hybridized only queues operations. Times in Python would
therefore show nothing, and these are times of MXNet's engine. An operation that reads a block's parameters begins when their
update is made. An operation that is declared to write an array begins when all operations that were queued before and use the
array are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import mxnet as mx

import commsched

from .operation import Operation, drain_before_forks, push, wait

#: The order of two gradients that are produced within this time means nothing: they belong to one layer or to operations that
#: MXNet runs as one (bulk execution), or they existed before.
_TOGETHER_SECONDS = 1e-3


def measure_order(gradients: Mapping[str, mx.nd.NDArray]) -> list[str]:
    """Return the names of ``gradients`` in forward order, and wait for all gradients.

    Forward uses the parameter first whose gradient backward produces last. Gradients that are produced together keep the order
    in which they are given. Raises MXNetError if an operation of this backward failed.
    """
    produced: list[tuple[float, int]] = []

    def note(index: int, operation: Operation) -> None:
        produced.append((monotonic(), index))
        operation.complete()

    names, arrays = list(gradients), list(gradients.values())
    for index in reversed(range(len(arrays))):
        push(partial(note, index), writes=[arrays[index]])
    for array in arrays:
        array.wait_to_read()
    return [names[index] for index in forward_order(produced)]


def forward_order(produced: Sequence[tuple[float, int]]) -> list[int]:
    """Return the indices of gradients in forward order. ``produced`` holds the time in seconds and the index of each, in the
    order of time."""
    together: list[list[int]] = []
    before = -1.0
    for at, index in produced:
        if not together or at - before > _TOGETHER_SECONDS:
            together.append([])
        together[-1].append(index)
        before = at
    return [index for indices in reversed(together) for index in sorted(indices)]


def trace_forward(net: mx.gluon.Block, *, session: commsched.Session | None = None) -> None:
    """Record the forward of each block of ``net`` in the timeline of the job (the setting ``trace``).

    Without a timeline this does nothing. Call it once, before the training, with the block that the training loop calls: a
    hybridized block does not call its children in each forward.

    A block's span begins when its parameters are updated and the block before has ended. It ends when forward has used the
    parameters. Blocks whose operations MXNet runs as one end together.

    Raises:
        CommschedError: from ``commsched.init()``.
    """
    session = session or commsched.init()
    if session.observer is not None:
        _ForwardSpans(net, session.observer.on_span, session)


class _ForwardSpans:
    def __init__(
        self, net: mx.gluon.Block, on_span: Callable[[str, str, float, float], None], session: commsched.Session
    ) -> None:
        self._net = net
        self._on_span = on_span
        self._session = session
        self._lock = threading.Lock()  # guards the two fields below
        self._since: dict[mx.gluon.Block, float] = {}  # the time at which the parameters were ready for this forward
        self._last_end = 0.0
        net.register_forward_pre_hook(self._before)
        net.register_forward_hook(self._after)
        session.on_close(self.drain)
        session.cleanup.callback(self.drain)
        drain_before_forks(self)

    def drain(self) -> None:
        """Return when all operations of this object are completed."""
        if not self._session.is_forked:
            wait([array for _, arrays in self._blocks() for array in arrays])

    def _before(self, *_: Any) -> None:
        for block, arrays in self._blocks():
            push(partial(self._begins, block), reads=arrays, even_if_failed=True)

    def _after(self, *_: Any) -> None:
        for block, arrays in self._blocks():
            push(partial(self._ends, block), writes=arrays, even_if_failed=True)

    def _blocks(self) -> list[tuple[mx.gluon.Block, list[mx.nd.NDArray]]]:
        """Return the blocks with initialised parameters of their own, and these parameters."""
        found: list[tuple[mx.gluon.Block, list[mx.nd.NDArray]]] = []

        def look_at(block: mx.gluon.Block) -> None:
            own = [parameter for parameter in block._reg_params.values() if parameter._data is not None]
            if own:
                found.append((block, [parameter.data() for parameter in own]))

        self._net.apply(look_at)
        return found

    def _begins(self, block: mx.gluon.Block, operation: Operation) -> None:
        """Record the start. Runs, like ``_ends``, in a thread of MXNet's engine."""
        with self._lock:
            self._since[block] = monotonic()
        operation.complete()

    def _ends(self, block: mx.gluon.Block, operation: Operation) -> None:
        with self._lock:
            end = monotonic()
            start = max(self._since.get(block, end), self._last_end)
            self._last_end = end
        operation.complete()
        self._on_span("forward", block.name, start, end)
