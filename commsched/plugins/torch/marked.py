"""Marked tensors: torch's dispatcher calls this module before an operation touches one of them.

``__torch_function__`` sees only calls from Python that check the classes of tensors. TorchScript, C++ extensions and those
subclasses of torch that switch it off (nested tensors) bypass it. But all of them call operations through the dispatcher, which
looks at the dispatch keys of each argument. A marked tensor carries an additional key that nothing else in torch uses and that
has priority over all others. The function registered here for that key is called before the operation begins.

A mark takes no memory: it is one more bit in a tensor's set of keys. Code that takes the address of the memory and then reads
without any operation is not seen.

Marks, and outstanding updates, work on *twins*: other tensor objects in the same memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from typing import Any

import torch

log = logging.getLogger("commsched")

_C: Any = torch._C
_KEY = "TESTING_ONLY_GenericWrapper"  # torch's own, and private: a later version may lack it


class _WithKey(torch.Tensor):
    """A subclass that exists because torch allows such subclasses to be made with additional keys."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*args, **(kwargs or {}))


_once = threading.Lock()


def _key() -> Any:
    """Return the key, the set that contains only the key, and the registrations; None if this torch cannot use the key."""
    with _once:  # torch refuses a second registration
        return _registered()


@cache
def _registered() -> Any:
    try:
        key = _C._dispatch_key_parse(_KEY)
        keys = _C.DispatchKeySet(key)
        for_all, for_some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        for_all.fallback(_before_operation, _KEY)
        for operation in _with_weights():
            for_some.impl(operation, partial(_before_operation, operation), _KEY)
        return key, keys, for_all, for_some  # the libraries are kept, because the registrations end with them
    except (AttributeError, RuntimeError, TypeError):
        return None


@cache
def warn_if_impossible() -> None:
    """Warn, once, if this version of torch has no way to mark tensors."""
    if _key() is None:
        log.warning(
            "PyTorch %s has no '%s', which commsched marks parameters with: TorchScript, C++ extensions and nested tensors may "
            "read a parameter before its update; if you use such, call optimizer.synchronize() after each step()",
            torch.__version__,
            _KEY,
        )


def _with_weights() -> Iterator[Any]:
    """Yield operations that combine parameters with other tensors; they need separate registrations.

    If one of the other tensors is of a class of torch that is written in Python, such as nested tensors, torch does not find
    the fallback that is registered for all operations, and fails (``func != nullptr``).
    """
    products = ("linear", "embedding", "matmul", "mm", "bmm", "addmm", "baddbmm")
    for name in (*products, "add", "sub", "mul", "div", "layer_norm", "native_layer_norm", "rms_norm", "where", "prelu"):
        packet = getattr(torch.ops.aten, name, None)
        for overload in ("default", "Tensor", "self"):
            if packet is not None and overload in packet.overloads():
                yield getattr(packet, overload)


#: The dispatcher's thread-local state outside all operations.
_nothing: tuple[Any, Any] = (_C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set())

#: The functions that are called with a marked tensor before an operation touches it.
_on_touch: list[Callable[[torch.Tensor], None]] = []


def watch_marked(on_touch: Callable[[torch.Tensor], None]) -> None:
    """Call ``on_touch(tensor)`` before each operation with a marked tensor, in the thread of the operation.

    ``on_touch`` may raise. If the tensor is still marked when ``on_touch`` returns, the operation runs all the same.
    """
    _on_touch[:] = [on_touch]


def unnoticed() -> Any:
    """Return a context in which operations of this thread ignore marks."""
    known = _key()
    return nullcontext() if known is None else _C._ExcludeDispatchKeyGuard(known[1])


def is_marked(tensor: torch.Tensor) -> bool:
    known = _key()
    return known is not None and bool(_C._dispatch_keys(tensor).has(known[0]))


def marked_twin(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a marked tensor in the memory of ``tensor``, which is unmarked, or None if it cannot be marked."""
    known = _key()
    if (
        known is None
        or tensor.layout != torch.strided
        or not tensor.numel()
        or _C._dispatch_keys(tensor).has(_C.DispatchKey.Python)
    ):
        return None
    with torch.inference_mode(False), torch.no_grad(), _C.DisableTorchFunctionSubclass(), unnoticed():
        carrier = torch.Tensor._make_wrapper_subclass(
            _WithKey, (0,), dtype=tensor.dtype, device=tensor.device, _extra_dispatch_keys=known[1]
        )
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        twin.data = carrier  # copies the carrier's keys, except the keys of its class
        twin.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return twin


def unmark(tensor: torch.Tensor) -> None:
    """Remove the mark from ``tensor``, which got it from another tensor: as a view of that, say."""
    with torch.inference_mode(False), torch.no_grad(), _C.DisableTorchFunctionSubclass(), unnoticed():
        plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = plain


def _before_operation(operation: Any, *args: Any, **kwargs: Any) -> Any:
    still_marked = False
    for tensor in tensors_in((args, kwargs)):
        if is_marked(tensor):
            with _C._ForceDispatchKeyGuard(*_nothing):  # the operation may be part of another one that is running
                for on_touch in _on_touch:
                    on_touch(tensor)
            still_marked = still_marked or is_marked(tensor)
    if not still_marked:
        return operation(*args, **kwargs)
    with unnoticed():
        return operation(*args, **kwargs)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def alias(tensor: torch.Tensor, own_class: type) -> Any:
    """Return another tensor object that shares the memory, the attributes and the version counter of ``tensor``. Its class is
    ``own_class``."""
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        other: Any = tensor.detach()
        if type(other) is torch.Tensor:
            other.requires_grad_(tensor.requires_grad)
            other.__class__ = own_class
            other.__dict__ = tensor.__dict__
        return other


class Twin:
    """Another tensor object for one parameter: with its class, memory and attributes, but with a separate ``.grad``.

    The update of a parameter may run in any thread that reads it, so the user's optimizer works on twins. Changes that other
    threads make to ``parameter.grad`` meanwhile do not affect the update, and those threads do not see the ``.grad`` of the
    update.
    """

    __slots__ = (
        "address",
        "average",
        "dtype",
        "keeps_average",
        "marked",
        "nbytes",
        "plain",
        "shape",
        "stride",
        "tensor",
        "version",
    )

    def __init__(self, parameter: torch.Tensor, own_class: type) -> None:
        self.tensor = alias(parameter, own_class)
        self.version = 0  # the parameter's version when the update became outstanding
        self.average: torch.Tensor | None = None  # kept result of another_of(), which takes time to make
        self.keeps_average = False  # ``average`` is in ``.grad`` of the tensor between updates
        self._look()

    def _look(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.plain = self.tensor.detach()  # a tensor without the parameter's attributes
        self.marked = marked_twin(self.plain)
        self.address = self.plain.data_ptr()
        self.shape, self.stride, self.dtype = self.plain.shape, self.plain.stride(), self.plain.dtype
        self.nbytes = self.plain.nbytes

    def follow(self, parameter: torch.Tensor) -> bool:
        """Follow ``parameter`` if the user has given it other memory, and return whether that is so. The parameter must be
        neither guarded nor marked."""
        if (
            parameter.data_ptr() == self.address
            and parameter.shape == self.shape
            and parameter.stride() == self.stride
            and parameter.dtype == self.dtype
        ):
            return False
        self.tensor.data = parameter
        self.tensor.grad, self.keeps_average = None, False
        self._look()
        return True

    def take_values(self) -> bool:
        """Copy the values to the parameter's memory if the optimizer has given the twin other memory, and use that memory
        again. Return whether the values fit. The calling thread must be within ``unguarded`` and ``no_grad``."""
        twin = self.tensor
        if twin.shape != self.shape or twin.dtype != self.dtype:
            return False
        if twin.data_ptr() != self.address or twin.stride() != self.stride:
            self.plain.copy_(twin.clone())
            twin.data = self.plain
        return True

    def another_of(self, average: torch.Tensor) -> torch.Tensor:
        """Return another tensor object in the memory of the parameter's ``average``; the same object each time."""
        if self.average is None:
            self.average = average.detach()
        return self.average

    def has_moved(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is the object of :meth:`another_of`, called when it lies in other memory than the average.

        If so, the optimizer has given it other memory through ``.data``, and the next update gets a new object.
        """
        if gradient is not self.average:
            return False
        self.average = None
        return True


def share_versions(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether it has its version in common with others of ``tensors``, as parts of one tensor have, also
    after they were given other memory. Their versions stay as they are."""
    before = [tensor._version for tensor in tensors]
    preserve = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for tensor in tensors:
            stack.enter_context(preserve(tensor))
        increment_versions(tensors)
        return [tensor._version > version + 1 for tensor, version in zip(tensors, before)]


def increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Increment the version of each tensor, as an in-place change does, so that graphs that saved it raise an error."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # before PyTorch 2.6: one by one
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
