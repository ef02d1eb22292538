"""Guarded tensors: the tensor itself is the dependency proxy.

While a tensor waits for something (a parameter for its update, a gradient for its average), the object has a guarded class.
The ``__torch_function__`` of that class first waits (it *resolves* the tensor) and then does the operation. Python code that
computes with the tensor therefore waits. Once resolved, the object has its own class back and costs nothing. Only operations
that do not depend on the values (shape, dtype, ...) pass without waiting.

A parameter is marked, too (``marked.py``), so that readers that do not check the class wait as well. ``docs/limits.md``
lists the readers that neither mechanism sees.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch._compile import _disable_dynamo

from .marked import Twin, alias, is_marked, marked_twin, tensors_in, unmark, unnoticed, watch_marked


def is_surrounded() -> bool:
    """Whether this thread is within something that records, replaces or transforms operations."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    )


@contextmanager
def outside() -> Iterator[None]:
    """Suspend, for this thread, everything that records, replaces or transforms operations.

    This covers traces of ``torch.jit``, dispatch modes (``make_fx``, fake tensors), transforms of ``torch.func``, and the
    flag by which the optimizers of torch behave differently during compilation.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    tracer: Any = torch._C
    compiler: Any = torch.compiler
    tracing, compiling = tracer._get_tracing_state(), compiler._is_compiling_flag
    with ExitStack() as stack:
        stack.callback(tracer._set_tracing_state, tracing)
        tracer._set_tracing_state(None)
        stack.callback(setattr, compiler, "_is_compiling_flag", compiling)
        compiler._is_compiling_flag = False
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        yield


def _is_in_compiled_function() -> bool:
    """Whether a function that was compiled has called. What it does in Python depends on what could be compiled, which may
    change from call to call."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_code.co_name == "compile_wrapper":  # of torch._dynamo
            return True
        frame = frame.f_back
    return False


Resolve = Callable[[], None]


class Record(ref[torch.Tensor]):
    """A tensor that is guarded, or was. The record is kept, because each step guards the same tensors and finding a record is
    faster than making one."""

    __slots__ = ("address", "guarded", "key", "original", "plain", "resolve")

    key: int  # the key of this record in _guarded
    original: type  # class of the tensor while it is not guarded
    guarded: type  # class of the tensor while it is guarded
    resolve: Resolve | None  # None: the tensor is not guarded
    plain: torch.Tensor | None  # if the tensor is marked: an unmarked tensor in the same memory
    address: int  # of the marked memory

    def guard(self, tensor: torch.Tensor, resolve: Resolve, twin: Twin | None = None) -> None:
        """Do what the function :func:`guard` does for the tensor of this record."""
        is_new, self.resolve = self.resolve is None, resolve  # first: another thread may read the tensor at any time
        if is_new and self.original is not type(tensor):
            self.original, self.guarded = type(tensor), _guarded_class(type(tensor))
        if twin is not None and twin.marked is not None:
            self.plain, self.address = twin.plain, twin.address
            _marked[twin.address] = self
            if is_new:
                tensor.data = twin.marked
            else:
                with unguarded():
                    tensor.data = twin.marked
        if is_new:
            tensor.__class__ = self.guarded

    def release(self, tensor: torch.Tensor) -> None:
        """Do what the function :func:`release` does for the tensor of this record. The call must be within ``unnoticed()`` if
        the tensor is marked."""
        if self.resolve is not None:
            tensor.__class__ = self.original
            if self.plain is not None:
                tensor.data = self.plain
                _marked.pop(self.address, None)
                self.plain = None
            self.resolve = None


#: The record of each tensor that was ever guarded, by id. Records keep no tensor alive, so that an unused model can be
#: collected. The resolve functions must not do so either; they refer to their optimizer weakly.
_guarded: dict[int, Record] = {}

#: The marked tensor, by the address of its memory. Tensors that C++ code derives from one may be marked, too.
_marked: dict[int, ref[torch.Tensor]] = {}

#: Context in which this thread uses guarded tensors without waiting: for operations that need no values, and for updates.
unguarded = torch._C.DisableTorchFunctionSubclass

_T = torch.Tensor
#: Operations that read no values. ``grad`` is included because the gradient is guarded itself. ``is_complex`` reads no values
#: either, but is not included: it is the only method that ``torch.distributed.scatter`` calls on tensors in a list, where
#: marks are not seen.
VALUE_FREE: frozenset[Any] = frozenset(
    [getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "grad", "grad_fn")]
    + [getattr(_T, name).__get__ for name in ("requires_grad", "is_leaf", "is_cpu", "is_cuda", "is_sparse", "nbytes")]
    + [getattr(_T, name).__set__ for name in ("grad", "requires_grad")]
    + [_T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.element_size, _T.ndimension, _T.is_contiguous]
    + [_T.is_floating_point, _T.requires_grad_, _T.get_device, _T.__len__, _T.__hash__]
    + [_T.register_hook, _T.register_post_accumulate_grad_hook, torch.is_floating_point]
)


#: Operations that need not be done at once: the function is called with the operation and its arguments, and returns what the
#: operation would, or NotImplemented if it must be done at once.
LATER: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {}


def guard(tensor: torch.Tensor, resolve: Resolve, twin: Twin | None = None) -> None:
    """Let operations that need the values of ``tensor`` call ``resolve`` first, until :func:`release`. It waits for the values,
    and raises if they cannot be made. Guarding the tensor again replaces it.

    ``twin`` is given if the tensor is to be marked, too. The call must then be within ``unnoticed()``.
    """
    record_of(tensor).guard(tensor, resolve, twin)


def record_of(tensor: torch.Tensor) -> Record:
    """Return the record of ``tensor``, which stays the same as long as the tensor exists."""
    return _guarded.get(id(tensor)) or _note(tensor)


def _note(tensor: torch.Tensor) -> Record:
    known = Record(tensor, _forget)
    known.key, known.original, known.guarded = id(tensor), type(tensor), _guarded_class(type(tensor))
    known.resolve, known.plain, known.address = None, None, 0
    _guarded[known.key] = known
    return known


def _forget(gone: Record) -> None:
    """Drop the record of a collected tensor, because another tensor may get its id."""
    if _guarded.get(gone.key) is gone:
        del _guarded[gone.key]
        if gone.plain is not None:
            _marked.pop(gone.address, None)


def release(tensor: torch.Tensor) -> None:
    """Give ``tensor`` its own class back. Its average or update must be complete. No-op if the tensor is not guarded."""
    known = _guarded.get(id(tensor))
    if known is not None and known.resolve is not None:
        with unnoticed() if known.plain is not None else nullcontext():
            known.release(tensor)


def is_guarded(tensor: torch.Tensor) -> bool:
    known = _guarded.get(id(tensor))
    return known is not None and known.resolve is not None


def was_guarded(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was ever guarded, so that it may be guarded again at any time."""
    return id(tensor) in _guarded


def resolver_of(tensor: torch.Tensor) -> Resolve | None:
    """The function that readers of ``tensor`` call first; None if the tensor is not guarded."""
    known = _guarded.get(id(tensor))
    return known.resolve if known is not None else None


def own_class(tensor: torch.Tensor) -> type:
    """The class of ``tensor`` when it is not guarded."""
    known = _guarded.get(id(tensor))
    return type(tensor) if known is None or known.resolve is None else known.original


def address(tensor: torch.Tensor) -> int:
    """The memory address of ``tensor``'s values. It does not wait for the values."""
    if type(tensor) is torch.Tensor:
        return tensor.data_ptr()
    with unguarded():
        return tensor.data_ptr()


def resolve(tensor: torch.Tensor) -> None:
    """Wait for the values of ``tensor``, if it is guarded; called before a read. Raises the error of its resolve function."""
    known = _guarded.get(id(tensor))
    if known is None:
        return
    resolves = known.resolve
    if resolves is None:
        return
    if is_surrounded():
        with outside():
            resolves()
        if getattr(known.resolve, "is_there", False):
            release(tensor)  # what surrounds this thread may know plain tensors only
    else:
        resolves()


def _resolve_marked(tensor: torch.Tensor) -> None:
    """Make a reader that does not check the class wait, as :func:`resolve` does for other readers."""
    known = _marked.get(address(tensor))
    owner = known() if known is not None else None
    its_class = type(owner)
    if issubclass(its_class, Guarded):
        its_class.commsched_resolve(owner)
    elif owner is not None:  # it is being guarded, or released, by another thread
        resolve(owner)
    if is_marked(tensor) and not (owner is not None and is_guarded(owner)):
        unmark(tensor)  # it was derived from a marked tensor that was resolved since


watch_marked(_resolve_marked)


class _Mark(ref[torch.Tensor]):
    """A tensor that was marked by :func:`mark`."""

    __slots__ = ("address",)

    address: int


def mark(tensor: torch.Tensor) -> None:
    """Let readers that do not check the class of ``tensor``, which is guarded, wait as well, until :func:`forget_mark`."""
    with torch.inference_mode(False), unguarded(), unnoticed():
        marked = marked_twin(tensor)
        if marked is None:
            return
        known = _Mark(tensor, _drop_mark)
        known.address = tensor.data_ptr()
        _marked[known.address] = known
        tensor.data = marked


def forget_mark(tensor: torch.Tensor) -> None:
    """Remove the mark of :func:`mark`, if ``tensor`` has it."""
    known = _marked.get(address(tensor))
    if known is not None and known() is tensor:
        _marked.pop(address(tensor), None)  # another thread may have done so
        unmark(tensor)


def _drop_mark(gone: _Mark) -> None:
    if _marked.get(gone.address) is gone:
        _marked.pop(gone.address, None)


class Guarded:
    """Mixin that precedes a tensor's own class in the guarded class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make ``type(parameter)(data)`` a tensor of the unguarded class, because the new tensor waits for nothing."""
        return cls.__mro__[2](*args, **kwargs)

    @classmethod
    @_disable_dynamo
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in VALUE_FREE:
            with unguarded():
                return func(*args, **kwargs)
        later = LATER.get(func)
        if later is not None and not is_surrounded() and not _is_in_compiled_function():
            done = later(func, args, kwargs)
            if done is not NotImplemented:
                return done
        guarded = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Guarded)]
        for tensor in guarded:
            its_class = type(tensor)
            if issubclass(its_class, Guarded):  # else it was released with another one
                its_class.commsched_resolve(tensor, func)
        if not any(isinstance(tensor, Guarded) for tensor in guarded):
            return func(*args, **kwargs)  # dispatches to the classes of the other tensors
        # A tensor that is still guarded is a gradient that is there, or is being updated by this very thread.
        with unguarded():
            return func(*args, **kwargs)

    def commsched_resolve(self: Any, func: Any = None) -> None:
        """Wait for the values, because ``func`` is called with the tensor."""
        resolve(self)

    # Python looks these up before any operation.

    @_disable_dynamo
    def __deepcopy__(self: Any, memo: Any) -> Any:
        resolve(self)
        plain = alias(self, own_class(self))
        if plain.layout == torch.strided and plain.untyped_storage().nbytes() > plain.nbytes:
            # deepcopy copies the whole storage once for all tensors in it, but the other tensors' values may be outstanding.
            with torch.inference_mode(False), torch.no_grad(), unguarded():
                plain.data = plain.clone()
        copied = copy.deepcopy(plain, memo)
        memo.pop(id(plain), None)  # another object may get this id
        memo[id(self)] = copied
        return copied

    @_disable_dynamo
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        resolve(self)
        return alias(self, own_class(self)).__reduce_ex__(protocol)

    @_disable_dynamo
    def as_subclass(self: Any, cls: Any) -> Any:
        resolve(self)
        return _T.as_subclass(self, cls)

    def detach(self: Any) -> Any:
        """As ``Tensor.detach``, but ``nn.Parameter(parameter)`` calls it for classes that it does not know, and then needs a
        tensor of the original class."""
        detached = _T.detach(self)
        if sys._getframe(1).f_code is _parameter_new and type(detached) is _T:
            detached.__class__ = own_class(self)
        return detached


_parameter_new = torch.nn.Parameter.__new__.__code__


@cache
def _guarded_class(original: type) -> type:
    guarded = type(f"Guarded{original.__name__}", (Guarded, original), {"__slots__": ()})
    for known in _classes_for_foreach():
        if original in known and guarded not in known:
            known.append(guarded)
    return guarded


def _classes_for_foreach() -> Iterator[list[type]]:
    """The lists of classes for which torch uses operations on lists of tensors. Other packages may add classes, too."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        known = getattr(sys.modules.get(module), "_foreach_supported_types", None)
        if isinstance(known, list):
            yield known
