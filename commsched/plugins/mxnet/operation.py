"""Operations of MXNet's own engine that begin in Python and end when any thread completes them.

``MXEnginePushAsyncND`` queues an operation that writes an array. It begins when all earlier operations on the array are over,
and later operations on the array wait until it is completed. Meanwhile no thread of the engine waits.
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
from mxnet.ndarray.ndarray import dl_managed_tensor_deleter

from ...core import errors
from ...core.errors import ClosedError, CommschedError, UnsupportedError

# MXNet calls this when an array that ``mx.nd.from_numpy`` made is freed. At exit Python may free it before the last of those
# arrays; it does so in a script that imports ``mxnet.contrib.amp``, and the process ended by SIGSEGV. So it is never freed.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(dl_managed_tensor_deleter))

_CPU = (ctypes.c_int * 2)(1, 0)  # the engine's Context: cpu(0)
_PRIORITIZED = ctypes.c_int(3)  # FnProperty::kCPUPrioritized: runs in threads that compute no layers
_NORMAL = ctypes.c_int(0)  # FnProperty::kNormal: runs in the thread that computes layers
_NAME = b"commsched"

#: Arguments: the engine, the address of the :class:`_OnComplete`, and the number under which :func:`push` stores ``begin``.
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
#: Arguments: the engine, the operation, and the address of a C++ ``std::runtime_error`` or null.
_Complete = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

_numbers = itertools.count(1)
_queued: dict[int, Callable[[Operation], None]] = {}
_pushing = threading.local()
_running: dict[int, None] = {}  # threads of the engine that are running :func:`_begin`
_completing: dict[Operation, None] = {}  # operations that some thread is completing now


class _OnComplete(ctypes.Structure):
    """``mxnet::engine::CallbackOnComplete``. The engine frees its instance when the operation's function has returned."""

    _fields_ = [("complete", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("operation", ctypes.c_void_p)]


class Operation:
    """An operation that has begun. It must be completed exactly once, by :meth:`complete` or :func:`fail`, in any thread."""

    __slots__ = ("_arguments", "_complete")

    def __init__(self, on_complete: int) -> None:
        callback = _OnComplete.from_address(on_complete)
        self._complete = _Complete(callback.complete)
        self._arguments = (callback.engine, callback.operation)

    def complete(self) -> None:
        """Complete the operation, so that operations that wait for its arrays can run. Never waits."""
        self._complete_with(None)

    def _complete_with(self, runtime_error: int | None) -> None:
        _completing[self] = None
        try:
            self._complete(*self._arguments, runtime_error)
        finally:
            del _completing[self]


class _RuntimeError:
    """A ``std::runtime_error`` that exists during one call. The engine's errors, ``dmlc::Error``, add nothing to that type."""

    def __init__(self, message: str) -> None:
        self._memory = ctypes.create_string_buffer(64)
        self._message = message.encode()

    def __enter__(self) -> int:
        _construct(self._memory, self._message)
        return ctypes.addressof(self._memory)

    def __exit__(self, *_: object) -> None:
        _destroy(self._memory)


_standard = ctypes.CDLL("libstdc++.so.6")  # the library that libmxnet has loaded
_construct = _standard["_ZNSt13runtime_errorC1EPKc"]
_construct.argtypes, _construct.restype = (ctypes.c_void_p, ctypes.c_char_p), None
_destroy = _standard["_ZNSt13runtime_errorD1Ev"]
_destroy.argtypes, _destroy.restype = (ctypes.c_void_p,), None


def _raised_as(kind: type[CommschedError]) -> None:
    """Have the engine raise, in the user's thread, the class and message of the error that completed an operation."""
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
    """Queue an operation that reads or writes arrays.

    Args:
        begin: called in a thread of the engine. It must not wait, and must ensure that the operation is completed.
        reads: arrays that the operation reads.
        writes: arrays that the operation writes.
        even_if_failed: call ``begin`` also if the computation of one of the arrays has failed.
        among_layers: call ``begin`` in the thread that computes layers. That thread then waits for Python's lock.

    Raises:
        UnsupportedError: this engine runs each operation to its end at once (``MXNET_ENGINE_TYPE=NaiveEngine``).
        ClosedError: the interpreter is ending, and MXNet's engine calls no function any more.
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
                None,  # no deleter
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
    """Complete ``operations`` with ``error``. Any thread; never waits.

    No operation then computes with their arrays, and a read of an array that depends on them raises ``error``.

    If several threads complete operations with an error at the same time, MXNet's memory is corrupted: its list of errors,
    ``global_exception_refs_``, seems to have no lock. Therefore all operations of this plugin fail in the thread that computes
    layers. That thread also skips the operations that depend on them.
    """

    def complete_all(own: Operation) -> None:
        # MXNet takes the class from what is before the first colon, so there is one even if the error says nothing.
        with _RuntimeError(f"{type(error).__name__}: {error}") as address:
            for operation in operations:
                operation._complete_with(address)
        own.complete()

    if operations:
        push(complete_all, writes=[mx.nd.empty((1,), ctx=mx.cpu(0))], among_layers=True)


def complete_and_set(event: threading.Event, operation: Operation) -> None:
    operation.complete()
    event.set()


def wait(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Return when all operations on ``arrays`` are completed, and no thread runs code of this module for the engine.

    MXNet raises an error once only. Unlike MXNet's ``wait_to_read``, this function leaves it to the next reader of the arrays.
    """
    if _ended.is_set():
        return
    over = [threading.Event() for _ in arrays]
    for array, event in zip(arrays, over):
        push(partial(complete_and_set, event), writes=[array], even_if_failed=True, among_layers=True)
    for event in over:
        event.wait()
    while _running or _completing:
        # An event would not do: the thread that sets it still needs Python's lock to leave, and must be gone before a fork.
        time.sleep(1e-4)


_ended = threading.Event()


def _end() -> None:
    """Wait for all operations at exit, and mark the engine as ended.

    Runs right before MXNet's own exit handler, which was registered earlier and after which the engine calls no function. That
    handler would print errors that were not read; they are discarded here, because they have been reported.
    """
    try:
        mx.nd.waitall()
    except Exception:
        pass
    _ended.set()


atexit.register(_end)


class Draining(Protocol):
    """An object that queues operations."""

    def drain(self) -> None:
        """Return when all of its operations are completed."""


_draining: WeakSet[Draining] = WeakSet()


def drain_before_forks(draining: Draining) -> Callable[[], None]:
    """Call ``draining.drain()`` before each fork, for example before a DataLoader starts its workers.

    In a fork MXNet waits for its queue and joins its threads while it holds Python's lock, so operations that need Python
    would never end. The returned function undoes the registration.
    """
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
        if getattr(_pushing, "number", None) == number:  # in the thread that pushes: only NaiveEngine does that
            _pushing.number = None
            operation.complete()
        else:
            begin(operation)
    finally:
        del _running[thread]  # a statement, not a call: after a call, Python may give its lock to another thread


_function = _Function(_begin)  # kept as long as the process, since operations may be pending
