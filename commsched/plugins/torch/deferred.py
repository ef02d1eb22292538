"""Deferred tensors: small tensors that get their values when these are used.

The norm of gradients is known before their averages, but not yet when ``clip_grad_norm_`` asks for it. It returns a tensor
whose class is :class:`Deferred`. Arithmetic with deferred tensors and numbers gives deferred tensors again. Any other use waits
for the values first.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo

from .guard import Guarded, forget_mark, is_surrounded, mark, outside, unguarded
from .marked import unnoticed

#: The most elements of a deferred tensor.
_MOST = 1 << 16


class Source(Protocol):
    """A deferred value has to wait for this."""

    @property
    def is_open(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...


class Value:
    """A tensor that is computed when it is needed for the first time, at the latest.

    ``kind`` and ``size`` describe how it is computed, and are the same on all ranks that compute it alike: ``kind`` exactly,
    ``size`` up to rounding. Any thread may use it.
    """

    __slots__ = ("__weakref__", "_compute", "_tensor", "kind", "length", "size", "sources")

    def __init__(
        self, compute: Callable[[], torch.Tensor], kind: str, size: float, sources: frozenset[Source], length: int = 0
    ) -> None:
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._tensor: torch.Tensor
        self.kind = kind
        self.size = size
        self.sources = sources
        self.length = length  # of a tensor whose elements are deferred tensors of their own

    @property
    def is_there(self) -> bool:
        """Whether :meth:`get` would not wait."""
        return self._compute is None or all(source.is_open for source in self.sources)

    def get(self) -> torch.Tensor:
        """Return the tensor, which nobody may change. Raises CommschedError if the job has failed."""
        compute = self._compute
        if compute is not None:
            with torch.inference_mode(False), torch.no_grad(), unguarded():
                self._tensor = compute()  # a second thread computes the same
            self._compute = None
        return self._tensor

    def item(self, index: int) -> Value:
        """One element of it."""
        return Value(lambda: self.get()[index], f"{self.kind}.{index}", self.size, self.sources)


class Deferred(Guarded, torch.Tensor):
    """A tensor whose memory gets its values when they are read.

    It keeps this class in the round of its gradients, so that ranks which read it go on as others do.
    """

    _deferred: tuple[Value, int | None]  # the value, or that and the index of an element of it

    @classmethod
    @_disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _ARITHMETIC and not is_surrounded():
            result = _combine(func, args, kwargs or {})
            if result is not None:
                return result
        if func in _READS and isinstance(args[0], Deferred):
            args[0].commsched_resolve(func)
            if (found := args[0].__dict__.get("_deferred")) is not None:  # its mark would take this for more than a read
                value, index = found
                args = (value.get() if index is None else value.get()[index], *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def commsched_resolve(self, func: Any = None) -> None:
        """Put the values into the memory. After anything but a read the tensor is plain: it may have been changed."""
        found = self.__dict__.get("_deferred")
        if found is None:
            return  # another thread was here
        value, index = found
        with outside() if is_surrounded() else nullcontext():
            values = value.get()
            with torch.inference_mode(False), torch.no_grad(), unguarded(), unnoticed():
                _T.copy_(self, values if index is None else values[index])
        if func not in _READS or all(source.is_over for source in value.sources):
            self.__class__ = torch.Tensor  # type: ignore[assignment]
            self.__dict__.pop("_deferred", None)
            forget_mark(self)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Do what ``Tensor.to`` does, without a detour in the usual case: ``clip_grad_norm_`` calls it for each gradient."""
        if len(args) == 1 and not kwargs and type(args[0]) is torch.device and args[0].type == "cpu":
            return self
        return super().to(*args, **kwargs)

    def as_subclass(self, cls: Any) -> Any:
        self.commsched_resolve()
        return self.as_subclass(cls)

    def __deepcopy__(self, memo: Any) -> Any:
        self.commsched_resolve()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.commsched_resolve()
        return self.__reduce_ex__(protocol)


def defer(tensor: torch.Tensor, value: Value, index: int | None = None) -> torch.Tensor:
    """Let ``tensor``, a plain one, be deferred. Its values are those of ``value``, or its element ``index``.

    Readers that do not check its class, such as ``torch.tensor()`` and TorchScript, wait only if the caller marks it, too. A
    mark takes time, so tensors that are mostly used together, and those that torch uses itself, have none."""
    tensor._deferred = value, index  # type: ignore[attr-defined]
    tensor.__class__ = Deferred
    return tensor


def value_of(tensor: Deferred) -> Value:
    value, index = tensor._deferred
    return value if index is None else value.item(index)


def describe(number: Any) -> tuple[str, float]:
    """How ranks compare ``number``: what they must have in common exactly, and up to rounding. The second is a logarithm, so
    that rounding changes it by the same for small and large numbers."""
    if not isinstance(number, int | float | torch.Tensor):
        return str(number), 0.0
    number = float(number)
    if number == 0 or not math.isfinite(number):
        return str(number), 0.0
    return ("+" if number > 0 else "-"), math.log2(abs(number))


def weight(place: int) -> float:
    """A factor for the size of the number at ``place``, so that ranks notice if numbers have changed places."""
    return 1 + place * 0.6180339887 % 1.0


def is_number(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is no more than a number, whose value may be taken now."""
    plain = type(tensor) is torch.Tensor and tensor.dim() == 0 and tensor.is_cpu and not tensor.requires_grad
    return plain and not tensor.dtype.is_complex


def _combine(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the deferred result of ``func``; None if it has to be computed at once."""
    try:
        taken = _Arguments(func, args, kwargs)
    except _Impossible:
        return None
    with torch.inference_mode(False), torch.no_grad(), unguarded(), unnoticed():
        shape = func(*args, **kwargs)  # the values in there are not used
        if not isinstance(shape, torch.Tensor) or shape.numel() > _MOST:
            return None
        shape = shape.clone()  # it may be an argument, or lie in its memory
    mark(defer(shape, taken.stacked or taken.value()))
    return shape


class _Impossible(Exception):
    """An argument is neither a number nor a deferred tensor."""


class _Arguments:
    """The arguments of an operation, with a value in place of each deferred tensor."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("out") is not None:
            raise _Impossible  # the user's own tensor, which must have the values now
        self._func = func
        self._kinds: list[str] = [func.__name__, *sorted(kwargs)]
        self._size = 0.0
        self._sources: set[Source] = set()
        self.stacked: Value | None = None  # the result is this value, which was there before its elements were
        if func is torch.stack and len(args) == 1 and not kwargs:
            self.stacked = _whole(args[0])
        if self.stacked is None:
            self._args = self._take(args)
            self._kwargs = {name: self._take(value) for name, value in kwargs.items()}

    def _take(self, given: Any) -> Any:
        if isinstance(given, tuple | list):
            return [self._take(each) for each in given]
        if isinstance(given, Deferred):
            if given.requires_grad:
                raise _Impossible  # autograd is to know the operation
            given = value_of(given)
            if all(source.is_over for source in given.sources):
                raise _Impossible
            self._sources |= given.sources
            kind, size = given.kind, given.size
        else:
            if isinstance(given, torch.Tensor):
                if not is_number(given):
                    raise _Impossible
                given = given.detach().clone()
            elif not isinstance(given, int | float | str | torch.dtype | torch.device | None):
                raise _Impossible
            kind, size = describe(given)
        self._kinds.append(kind)
        self._size += weight(len(self._kinds)) * size
        return given

    def value(self) -> Value:
        func, args, kwargs = self._func, self._args, self._kwargs

        def compute() -> torch.Tensor:
            result: torch.Tensor = func(*_computed(args), **{name: _computed(value) for name, value in kwargs.items()})
            return result

        return Value(compute, digest_of_text(repr(self._kinds)), self._size, frozenset(self._sources))


def _computed(value: Any) -> Any:
    if isinstance(value, list):
        return [_computed(each) for each in value]
    return value.get() if isinstance(value, Value) else value


def digest_of_text(text: str) -> str:
    return f"{zlib.crc32(text.encode()):x}"


def _whole(values: Any) -> Value | None:
    """The value of which ``values`` are all elements in order; None if they are not."""
    if not isinstance(values, tuple | list) or not values or type(values[0]) is not Deferred:
        return None
    whole = values[0]._deferred[0]
    if len(values) != whole.length or all(source.is_over for source in whole.sources):
        return None
    for index, each in enumerate(values):
        if type(each) is not Deferred or each._deferred[0] is not whole or each._deferred[1] != index:
            return None
    return whole


_T = torch.Tensor
_READS = frozenset(
    getattr(_T, name) for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__repr__", "__format__")
)


def _named(names: Iterable[str]) -> Iterable[Any]:
    for name in names:
        for module in (torch, torch.Tensor, torch.linalg):
            if hasattr(module, name):
                yield getattr(module, name)


#: Operations whose result depends on nothing but the values of small tensors, and has a shape that does not.
_ARITHMETIC = frozenset(
    _named(
        [
            "add",
            "sub",
            "mul",
            "div",
            "true_divide",
            "pow",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "square",
            "neg",
            "abs",
            "exp",
            "log",
            "log2",
            "log10",
            "clamp",
            "clip",
            "clamp_min",
            "clamp_max",
            "minimum",
            "maximum",
            "sum",
            "mean",
            "amax",
            "amin",
            "stack",
            "norm",
            "vector_norm",
            "isnan",
            "isinf",
            "isfinite",
            "logical_or",
            "logical_and",
            "logical_not",
            "any",
            "all",
            "where",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "detach",
            "clone",
            "to",
            "float",
            "double",
            "cpu",
            "contiguous",
            "nan_to_num",
            "__add__",
            "__radd__",
            "__sub__",
            "__rsub__",
            "__mul__",
            "__rmul__",
            "__truediv__",
            "__rtruediv__",
            "__div__",
            "__rdiv__",
            "__pow__",
            "__rpow__",
            "__eq__",
            "__ne__",
            "__lt__",
            "__le__",
            "__gt__",
            "__ge__",
            "__neg__",
            "__abs__",
            "__or__",
            "__and__",
            "__invert__",
        ]
    )
)
