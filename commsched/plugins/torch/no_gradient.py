"""Parameters without a gradient after backward: reading ``.grad`` waits until it is known whether another rank has one.

If another rank has one, the read returns the average, as if one process had run the joint batch. If no rank has a gradient,
``.grad`` stays None.

Until that is known, the class of such a parameter has its own ``grad`` property. It is not a guard: only reads of ``.grad``
are intercepted.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from weakref import WeakMethod, ref

import torch

#: Who knows about the missing gradient, by the parameter's id. Weak, because that refers to the buffers.
_awaited: dict[int, ref[NoGradients]] = {}

_grad: Any = torch.Tensor.grad


class NoGradient:
    """Mixin that precedes a parameter's own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__mro__[2](*args, **kwargs)  # type(parameter)(data) makes a parameter of the own class

    @property
    def grad(self) -> torch.Tensor | None:
        owner = _owner(self)
        if owner is not None:
            owner.ask()
        gradient: torch.Tensor | None = _grad.__get__(self)
        return gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        _grad.__set__(self, gradient)
        if gradient is None:
            _drop(self)

    @grad.deleter
    def grad(self) -> None:
        _grad.__delete__(self)
        _drop(self)

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
            gradients exist, put them into ``.grad``, except for those ``dropped``, and :meth:`forget` all parameters.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = WeakMethod(ask)
        self._lock = threading.Lock()  # threads may read at once, and a class must be given back only once
        self.noted: list[torch.nn.Parameter] = []
        #: The ids of noted parameters whose ``.grad`` the user has set to None: other ranks may have dropped a gradient there.
        self.dropped: set[int] = set()

    def ask(self) -> None:
        ask = self._ask()
        if ask is not None:
            ask()

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Note those of ``parameters`` that have no gradient. None of them may be guarded."""
        for parameter in parameters:
            if _grad.__get__(parameter) is None:
                _awaited[id(parameter)] = ref(self)
                if not isinstance(parameter, NoGradient):
                    parameter.__class__ = _class(type(parameter))
                    self.noted.append(parameter)

    def forget(self) -> None:
        """Forget all parameters: it is known which gradients exist, or it does not matter any more."""
        if self.noted:
            with self._lock:
                for parameter in self.noted:
                    _awaited.pop(id(parameter), None)
                    parameter.__class__ = type(parameter).__mro__[2]
                self.noted.clear()


def _owner(parameter: NoGradient) -> NoGradients | None:
    known = _awaited.get(id(parameter))
    return known() if known is not None else None


def _drop(parameter: NoGradient) -> None:
    owner = _owner(parameter)
    if owner is not None:
        owner.dropped.add(id(parameter))
        _awaited.pop(id(parameter), None)  # a read finds None


@cache
def _class(own: type) -> type:
    return type(own.__name__, (NoGradient, own), {"__slots__": ()})
