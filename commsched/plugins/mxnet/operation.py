"""Operations of MXNet's own engine that begin in Python and end when another thread says so.

``MXEnginePushAsyncND`` queues an operation that writes an array: it begins when all that was queued before and touches the
array is over, and what is queued after it waits until it is completed. None of the engine's threads waits meanwhile.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakSet

import mxnet as mx
from mxnet.base import _LIB as _mxnet
from mxnet.base import check_call

from ...core import errors
from ...core.errors import ClosedError, CommschedError, UnsupportedError

_CPU = (ctypes.c_int * 2)(1, 0)  # the engine's Context: cpu(0)
_PRIORITIZED = ctypes.c_int(3)  # FnProperty::kCPUPrioritized: begun by threads that compute no layers
_NORMAL = ctypes.c_int(0)  # FnProperty::kNormal: by the thread that computes layers
_NAME = b"commsched"

#: engine, where to find :class:`_OnComplete`, and the number under which :func:`push` keeps what is to be called.
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
#: engine, the operation, and a C++ ``std::runtime_error`` or nothing.
_Complete = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

_numbers = itertools.count(1)
_queued: dict[int, Callable[[Operation], None]] = {}
_pushing = threading.local()
_running: dict[int, None] = {}  # threads of the engine that are in :func:`_begin`
_completing: dict[Operation, None] = {}  # those of which MXNet is being told, by any thread


class _OnComplete(ctypes.Structure):
    """``mxnet::engine::CallbackOnComplete``; the engine's own is gone when the operation's function has returned."""

    _fields_ = [("complete", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("operation", ctypes.c_void_p)]


class Operation:
    """One that has begun. Must be completed, once, by any thread: by :meth:`complete`, or by :func:`fail`."""

    __slots__ = ("_arguments", "_complete")

    def __init__(self, on_complete: int) -> None:
        callback = _OnComplete.from_address(on_complete)
        self._complete = _Complete(callback.complete)
        self._arguments = (callback.engine, callback.operation)

    def complete(self) -> None:
        """What waits for the array goes on. Never waits."""
        self._complete_with(None)

    def _complete_with(self, runtime_error: int | None) -> None:
        _completing[self] = None
        try:
            self._complete(*self._arguments, runtime_error)
        finally:
            del _completing[self]


class _RuntimeError:
    """A ``std::runtime_error`` for the time of a call. The engine's errors are that; ``dmlc::Error`` adds nothing."""

    def __init__(self, message: str) -> None:
        self._memory = ctypes.create_string_buffer(64)
        self._message = message.encode()

    def __enter__(self) -> int:
        _construct(self._memory, self._message)
        return ctypes.addressof(self._memory)

    def __exit__(self, *_: object) -> None:
        _destroy(self._memory)


_standard = ctypes.CDLL("libstdc++.so.6")  # the one that libmxnet has loaded
_construct = _standard["_ZNSt13runtime_errorC1EPKc"]
_construct.argtypes, _construct.restype = (ctypes.c_void_p, ctypes.c_char_p), None
_destroy = _standard["_ZNSt13runtime_errorD1Ev"]
_destroy.argtypes, _destroy.restype = (ctypes.c_void_p,), None


def _raised_as(kind: type[CommschedError]) -> None:
    """What the engine raises in the user's thread is of the class, and has the message, that it was completed with."""
    mx.error.register(kind.__name__, lambda message: kind(message.removeprefix(f"{kind.__name__}: ")))


for _kind in vars(errors).values():
    if isinstance(_kind, type) and issubclass(_kind, CommschedError):
        _raised_as(_kind)


def push(
    begin: Callable[[Operation], None],
    *,
    reads: Sequence[mx.nd.NDArray] = (),
    writes: Sequence[mx.nd.NDArray] = (),
    even_if_failed: bool = False,
    among_layers: bool = False,
) -> None:
    """Queue an operation that reads or writes arrays. ``begin`` is called by a thread of the engine, must not wait, and sees to
    it that the operation is completed. If computing one of the arrays has failed, it is called only ``even_if_failed``.
    ``among_layers``: by the thread that computes layers, which then waits for Python's lock.

    Raises:
        UnsupportedError: this engine runs each operation to its end at once (``MXNET_ENGINE_TYPE=NaiveEngine``).
        ClosedError: the interpreter ends, and MXNet's engine calls nobody any more.
    """
    if _ended.is_set():
        raise ClosedError("MXNet's engine has ended with the interpreter: close the session before")
    number = next(_numbers)
    _queued[number] = begin
    _pushing.number = number
    try:
        check_call(
            _mxnet.MXEnginePushAsyncND(
                _function,
                ctypes.c_void_p(number),
                None,  # nothing to be freed
                _CPU,
                *_handles(reads),
                *_handles(writes),
                ctypes.byref(_NORMAL if among_layers else _PRIORITIZED),
                0,
                _NAME,
                ctypes.c_bool(even_if_failed),
            )
        )
        if _pushing.number is None:
            raise UnsupportedError(
                "MXNET_ENGINE_TYPE=NaiveEngine runs one operation after another and cannot wait for averages"
            )
    finally:
        _pushing.number = None


def _handles(arrays: Sequence[mx.nd.NDArray]) -> tuple[ctypes.Array[ctypes.c_void_p], int]:
    return (ctypes.c_void_p * len(arrays))(*(array.handle for array in arrays)), len(arrays)


def fail(operations: Sequence[Operation], error: CommschedError) -> None:
    """Complete ``operations`` so that nothing computes with their arrays, and whoever reads what depends on one gets ``error``
    raised. Any thread; never waits.

    Operations that are completed with an error by several threads at once corrupt MXNet's memory (its list of errors,
    ``global_exception_refs_``, seems to be guarded by nothing). So all of ours fail in the thread that computes layers, where
    those that depend on them are skipped, too.
    """

    def complete_all(own: Operation) -> None:
        with _RuntimeError(f"{type(error).__name__}: {error}") as address:
            for operation in operations:
                operation._complete_with(address)
        own.complete()

    if operations:
        push(complete_all, writes=[mx.nd.empty((1,), ctx=mx.cpu(0))], among_layers=True)


def wait(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Return when all that was queued for ``arrays`` is completed, and no thread is in the engine or in Python for us. Unlike
    MXNet's ``wait_to_read``, leaves an error there for who reads the arrays: each is raised but once."""
    if _ended.is_set():
        return
    over = [threading.Event() for _ in arrays]

    def complete(event: threading.Event, operation: Operation) -> None:
        operation.complete()
        event.set()

    for array, event in zip(arrays, over):
        push(partial(complete, event), writes=[array], even_if_failed=True, among_layers=True)
    for event in over:
        event.wait()
    while _running or _completing:
        # No event: a thread that sets one still needs Python's lock to leave, and a fork must not find it at that.
        time.sleep(1e-4)


_ended = threading.Event()


def _end() -> None:
    """Right before MXNet's own handler, which was registered before: after it no function is called. Errors that nobody has
    read until now it would print, and they have been told of."""
    try:
        mx.nd.waitall()
    except Exception:
        pass
    _ended.set()


atexit.register(_end)


class Draining(Protocol):
    """Somebody who queues operations."""

    def drain(self) -> None:
        """Return when none of them is to come."""
        ...


_draining: WeakSet[Draining] = WeakSet()


def drain_before_forks(draining: Draining) -> Callable[[], None]:
    """Before a fork (for a DataLoader's workers, say), MXNet waits for its queue and joins its threads, with Python's lock
    held. What is returned takes this back."""
    _draining.add(draining)
    return partial(_draining.discard, draining)


def _drain_all() -> None:
    for draining in tuple(_draining):
        draining.drain()


os.register_at_fork(before=_drain_all)


def _begin(engine: int, on_complete: int, number: int) -> None:
    thread = threading.get_ident()
    _running[thread] = None
    try:
        begin = _queued.pop(number)
        operation = Operation(on_complete)
        if getattr(_pushing, "number", None) == number:  # the thread that pushes; the other engines never do that
            _pushing.number = None
            operation.complete()
        else:
            begin(operation)
    finally:
        del _running[thread]  # not by a call: after one, Python may hand its lock to others


_function = _Function(_begin)  # as long as the process: operations may be pending
