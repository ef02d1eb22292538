"""Forward spans of the trace, one for each block that has parameters of its own.

A hybridized network is one call in Python, and a network that is not hybridized only queues operations. Times in Python would
therefore show nothing, and the spans use the times of MXNet's engine. An operation that reads a block's parameters begins when
their update is made. An operation that is declared to write them and is queued after the forward begins when all operations of
the forward that read them are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import mxnet as mx

import commsched

from .operation import Operation, drain_before_forks, push, wait


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
