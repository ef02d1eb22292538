"""Parameters without a gradient after backward: reading ``.grad`` waits until it is known whether another rank has one.

If another rank has one, the read returns the average, as if one process had run the joint batch. If no rank has a gradient,
``.grad`` stays None.

Until that is known, the class of such a parameter has its own ``grad`` property. It is not a guard: only reads of ``.grad``
are intercepted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import WeakMethod

import torch

#: The method to call when ``.grad`` is read, by the parameter's id. Weak, because the method's object refers to the buffers.
_awaited: dict[int, WeakMethod[Callable[[], None]]] = {}

_grad: Any = torch.Tensor.grad


class _NoGradient:
    """Mixin that precedes a parameter's own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__mro__[2](*args, **kwargs)  # type(parameter)(data) makes a parameter of the own class

    @property
    def grad(self) -> torch.Tensor | None:
        known = _awaited.get(id(self))
        ask = known() if known is not None else None
        if ask is not None:
            ask()
        gradient: torch.Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        _grad.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)

    def __deepcopy__(self: Any, memo: Any) -> Any:
        own, self.__class__ = self.__class__, type(self).__mro__[2]
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = own


class NoGradients:
    """The parameters of one optimizer that have no gradient so far.

    Args:
        ask: a bound method, held weakly. It is called when the gradient of one of them is read. It has to find out which
            gradients exist, put them into ``.grad``, and :meth:`forget` all parameters.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = WeakMethod(ask)
        self.noted: list[torch.nn.Parameter] = []

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note those of ``parameters`` that have no gradient. None of them may be guarded."""
        for parameter in parameters:
            if _grad.__get__(parameter) is None:
                _awaited[id(parameter)] = self._ask
                if not isinstance(parameter, _NoGradient):
                    parameter.__class__ = _class(type(parameter))
                    self.noted.append(parameter)

    def forget(self) -> None:
        """Forget all parameters: it is known which gradients exist, or it does not matter any more."""
        if self.noted:
            for parameter in self.noted:
                _awaited.pop(id(parameter), None)
                parameter.__class__ = type(parameter).__mro__[2]
            self.noted.clear()


@cache
def _class(own: type) -> type:
    return type(own.__name__, (_NoGradient, own), {"__slots__": ()})
