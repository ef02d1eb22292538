"""Guarded tensors: the tensor itself is the dependency proxy.

While something is outstanding for a tensor (the update of a parameter, the average of a gradient), the object's class is one
whose ``__torch_function__`` first resolves what is outstanding and then does the operation. Whoever computes with it from
Python therefore waits; once resolved, the object has its own class back and costs nothing. Only what says nothing about the
values (shape, dtype, ...) passes without waiting. PyTorch does not dispatch everything: see the limits in README.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._compile import _disable_dynamo

from .outside import is_surrounded, outside

Resolve = Callable[[], None]

#: id of each guarded tensor -> the tensor (so that the id stays its own), its class, and how to resolve it.
_guarded: dict[int, tuple[torch.Tensor, type, Resolve]] = {}

#: Within, this thread takes guarded tensors as they are: for what needs no values of theirs, or just updates them.
unguarded = torch._C.DisableTorchFunctionSubclass

_T = torch.Tensor
#: Operations that read no values. ``grad`` is here because a gradient is guarded itself.
_VALUE_FREE: frozenset[Any] = frozenset(
    [getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "grad", "grad_fn")]
    + [getattr(_T, name).__get__ for name in ("requires_grad", "is_leaf", "is_cpu", "is_cuda", "is_sparse", "nbytes")]
    + [getattr(_T, name).__set__ for name in ("grad", "requires_grad")]
    + [_T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.element_size, _T.ndimension, _T.is_contiguous]
    + [_T.is_floating_point, _T.is_complex, _T.requires_grad_, _T.get_device, _T.__len__, _T.__hash__]
    + [_T.register_hook, _T.register_post_accumulate_grad_hook, torch.is_floating_point, torch.is_complex]
)


def guard(tensor: torch.Tensor, resolve: Resolve) -> None:
    """From now on, operations that need the values of ``tensor`` call ``resolve`` first, until :func:`release`.

    ``resolve`` raises if the values cannot be had. Guarding again replaces it.
    """
    known = _guarded.get(id(tensor))
    original = known[1] if known is not None else type(tensor)
    _guarded[id(tensor)] = (tensor, original, resolve)
    if known is None:
        tensor.__class__ = _guarded_class(original)


def release(tensor: torch.Tensor) -> None:
    """Give ``tensor`` its own class back; nothing is outstanding for it. No-op when it is not guarded."""
    known = _guarded.pop(id(tensor), None)
    if known is not None:
        tensor.__class__ = known[1]


def is_guarded(tensor: torch.Tensor) -> bool:
    return id(tensor) in _guarded


def own_class(tensor: torch.Tensor) -> type:
    """The class of ``tensor`` when it is not guarded."""
    known = _guarded.get(id(tensor))
    return type(tensor) if known is None else known[1]


def address(tensor: torch.Tensor) -> int:
    """Where the values of ``tensor`` lie, without waiting for them."""
    with unguarded():
        return tensor.data_ptr()


def resolve(tensor: torch.Tensor) -> None:
    """What a reader of ``tensor`` does first. Raises what its resolution raises."""
    known = _guarded.get(id(tensor))
    if known is None:
        return
    if is_surrounded():
        with outside():
            known[2]()
    else:
        known[2]()


class _Guard:
    """Mixed in before a tensor's own class."""

    @classmethod
    @_disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VALUE_FREE:
            with unguarded():
                return func(*args, **kwargs)
        for tensor in _guards_in((args, kwargs)):
            resolve(tensor)
        # Still guarded is what this very thread is just updating.
        with unguarded():
            return func(*args, **kwargs)

    # Python looks these two up before any operation; they would rebuild an object of this class.

    @_disable_dynamo
    def __deepcopy__(self: Any, memo: Any) -> Any:
        resolve(self)
        with _own_class(self):
            return copy.deepcopy(self, memo)

    @_disable_dynamo
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        resolve(self)
        with _own_class(self):
            return self.__reduce_ex__(protocol)


@contextmanager
def _own_class(tensor: torch.Tensor) -> Iterator[None]:
    """For a moment, give back the class of a tensor that this very thread is just updating."""
    known = _guarded.get(id(tensor))
    release(tensor)
    try:
        yield
    finally:
        if known is not None:
            guard(tensor, known[2])


@cache
def _guarded_class(original: type) -> type:
    return type(f"Guarded{original.__name__}", (_Guard, original), {"__slots__": ()})


def _guards_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, _Guard):
        yield value  # type: ignore[misc]
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _guards_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _guards_in(item)
