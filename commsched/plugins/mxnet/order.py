"""The order in which forward uses parameters, as the first backward shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic

import mxnet as mx

from .operation import Operation, push

#: Gradients that come no further apart are of one layer, of operations that MXNet runs as one (bulk execution), or were
#: there already: their order says nothing.
_TOGETHER_SECONDS = 1e-3


def measure_order(gradients: Mapping[str, mx.nd.NDArray]) -> list[str]:
    """The names of ``gradients`` in forward order: what backward produces last was used first. Those that come together keep
    the order they are given in. Waits for all of them.

    Raises:
        MXNetError: an operation of this backward failed.
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
    """``produced``: when each index was, in seconds, in the order of time."""
    together: list[list[int]] = []
    before = -1.0
    for at, index in produced:
        if not together or at - before > _TOGETHER_SECONDS:
            together.append([])
        together[-1].append(index)
        before = at
    return [index for indices in reversed(together) for index in sorted(indices)]
