"""Norms of the averages of a group, as plugins use them (see ``core/norms.py``)."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..core.errors import CommschedError, TransportError, UnsupportedError
from ..core.group import TensorGroup
from ..core.interfaces import OnFailure, Transport
from ..core.manifest import Manifest, TensorSpec
from ..core.norms import ROW_DTYPE, NormsOf, require_orders
from ..core.task import ALL_GATHER

#: All rows of a step have at most this share of the bytes of the group, or so many bytes. Beyond that they would delay the
#: averages noticeably.
_MOST_SHARE = 1 / 16
_MOST_BYTES = 2**21

FloatRows = NDArray[np.float64]


def rows_for(group: TensorGroup, orders: Sequence[float], transport: Transport) -> Manifest:
    """The manifest of the rows that carry the norms of ``group`` over ``transport``, from the group's next step on.

    Raises:
        UnsupportedError: the transport cannot tell norms of this group, or the rows would be too large; says why. It is raised
            on all ranks alike.
        ValueError: there are no norms of these orders.
    """
    manifest = group.manifest
    norms = NormsOf(group.index, group.next_step, require_orders(orders))
    rows, gathers = transport.norm_rows(manifest), ALL_GATHER in transport.verbs
    name = type(transport).__name__
    if rows == 0:
        raise UnsupportedError(f"{name} cannot tell norms of the averages of these tensors before the averages")
    summed = next((spec for spec in manifest.tensors if spec.dtype == "uint8"), None)
    if summed is not None:
        raise UnsupportedError(f"tensor {summed} is summed and not averaged, so it has no norm")
    elements = norms.row_elements(len(manifest.tensors))
    nbytes = rows * elements * 8
    if nbytes > max(_MOST_BYTES, _MOST_SHARE * manifest.nbytes):
        raise UnsupportedError(
            f"the sums for the norms of {len(manifest.tensors)} tensors, from {rows} ranks or servers, would take {nbytes} "
            f"bytes of each rank in each step, beside {manifest.nbytes} bytes of averages"
        )
    if gathers:
        return Manifest((TensorSpec("commsched.norms", (rows, elements), ROW_DTYPE),), norms=norms)
    specs = (TensorSpec(f"commsched.norms.{row}", (elements,), ROW_DTYPE) for row in range(rows))
    return Manifest(tuple(specs), norms=norms)


class Norms:
    """The norms of the averages of one group, which are there before the averages. ``Session.add_norms`` makes them.

    Everything here is about the group's current step: the one begun last. Any thread may call it. All ranks get the same bits.

    Args:
        measured: the group.
        rows: the group of the rows, whose flat buffer is ``data``.
        report: ends the job.
    """

    def __init__(self, measured: TensorGroup, rows: TensorGroup, data: bytearray, report: OnFailure) -> None:
        self._measured = measured
        self._rows = rows
        self._data = np.frombuffer(data, np.float64)
        self._report = report
        norms = rows.manifest.norms
        assert norms is not None
        self.orders = norms.orders
        self._first_step = norms.first_step
        self._lock = threading.RLock()  # a signal handler may come here in a thread that has it
        self._step = -1  # of the totals below
        self._totals: dict[float, FloatRows] = {}  # by order

    @property
    def is_open(self) -> bool:
        """Whether the norms of the current step are there, so that :meth:`of` does not wait."""
        return all(proxy.is_open for proxy in self._rows.proxies)

    def wait(self) -> None:
        """Return when the norms of the current step are there.

        Raises:
            CommschedError: the job failed, or the session is closed.
        """
        for proxy in self._rows.proxies:
            proxy.wait()

    def of(self, order: float) -> FloatRows:
        """The norm of that order of each tensor's average, in the group's order of tensors. Waits for it. A tensor without
        elements has the norm 0.

        Raises:
            ValueError: the norms are not of that order, or no step has begun since they were added.
            TransportError: a row is missing or incomplete; ends the job on every rank.
            CommschedError: see :meth:`wait`.
        """
        if order not in self.orders:
            raise ValueError(f"norms of order {order} were not added; there are: {', '.join(map(str, self.orders))}")
        if self._rows.step < self._first_step:
            raise ValueError(f"no step of the group has begun since its norms were added: step {self._first_step} is the first")
        self.wait()
        with self._lock:
            if self._step != self._rows.step:
                self._totals = self._add_up(self._rows.step)
                self._step = self._rows.step
            total = self._totals[order]
        with np.errstate(all="ignore"):
            if math.isinf(order) or order == 1:
                return total.copy()
            return np.asarray(np.sqrt(total) if order == 2 else total ** (1 / order))

    def _add_up(self, step: int) -> dict[float, FloatRows]:
        """The sums of each tensor over all rows, in the order of rows on every rank, after checking the rows."""
        tensors = self._measured.manifest.tensors
        rows = self._data.reshape(-1, 1 + len(tensors) * (1 + len(self.orders)))
        for number, row in enumerate(rows):
            if row[0] != step:
                raise self._failed(f"row {number} of the norms of step {step} is that of step {row[0]:g}")
        columns = rows[:, 1:].reshape(len(rows), -1, len(tensors))  # the counts, then the sums of each order
        counts = _added(columns[:, 0])
        for spec, count in zip(tensors, counts.tolist()):
            if count != spec.numel:
                raise self._failed(f"the norm of '{spec.name}' of step {step} covers {count:g} of {spec.numel} elements")
        return {
            order: (_largest if math.isinf(order) else _added)(columns[:, place]) for place, order in enumerate(self.orders, 1)
        }

    def _failed(self, what: str) -> CommschedError:
        error = TransportError(what)
        self._report(error)
        return error


def _added(rows: FloatRows) -> FloatRows:
    """The sum of the rows, one after another: numpy may choose another order."""
    total: FloatRows = rows[0].copy()
    with np.errstate(all="ignore"):
        for row in rows[1:]:
            total += row
    return total


def _largest(rows: FloatRows) -> FloatRows:
    largest: FloatRows = np.maximum.reduce(rows)  # NaN if one is NaN
    return largest
