"""Norms of averages: what their sums are, and how they lie in a message.

Whoever makes an average (a shard, or the rank that owns a chunk) also adds up the powers of its elements. The sums of each
maker are a *row*. The rows of all makers travel to all ranks as a group of their own, whose manifest has a :class:`NormsOf`.
So every rank has the norms of a step before it has the averages, and all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: The dtype of a row.
ROW_DTYPE = "float64"

#: The most orders that one group has norms of.
_MAX_ORDERS = 16


@dataclass(frozen=True, slots=True)
class NormsOf:
    """A manifest with this has, as its elements, rows for the norms of the averages of ``group``, from that group's
    ``first_step`` on. Both groups count their steps alike.

    A row of ``t`` tensors begins with the number of its step. It goes on with the number of elements of each tensor that its
    maker has averaged. Then comes, for each order ``p`` in ``orders``, a number for each tensor: the sum of ``|x| ** p`` over
    these elements, or the largest ``|x|`` if ``p`` is infinite.
    """

    group: int
    first_step: int
    orders: tuple[float, ...]

    def row_elements(self, tensors: int) -> int:
        return 1 + tensors * (1 + len(self.orders))

    def to_record(self) -> list[Any]:
        return [self.group, self.first_step, [str(order) for order in self.orders]]  # JSON knows no infinity

    @classmethod
    def from_record(cls, record: Any) -> NormsOf:
        """The inverse of :meth:`to_record`.

        Raises:
            TypeError, ValueError: ``record`` is not a result of :meth:`to_record`.
        """
        group, first_step, orders = record
        if type(group) is not int or type(first_step) is not int or type(orders) is not list or group < 0 or first_step < 0:
            raise ValueError(f"norms of group {group!r} from step {first_step!r} on")
        return cls(group, first_step, require_orders([float(order) for order in orders]))

    def __str__(self) -> str:
        orders = ", ".join(f"{order:g}" for order in self.orders)
        return f"norms of order {orders} of group {self.group} from step {self.first_step} on"


def require_orders(orders: Sequence[float]) -> tuple[float, ...]:
    """Return ``orders``, of which norms can be put together from the rows of several makers.

    Raises:
        ValueError: an order is not greater than 0 or is given twice, or there are none or too many.
    """
    if not all(order > 0 for order in orders) or not 0 < len(orders) <= _MAX_ORDERS or len(set(orders)) < len(orders):
        raise ValueError(f"norms of the orders {list(orders)}: give 1 to {_MAX_ORDERS} different numbers greater than 0")
    return tuple(float(order) for order in orders)
