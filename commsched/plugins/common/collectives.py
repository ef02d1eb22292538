"""Collective calls that plugins share: arrays of rank 0, values that are gathered for one purpose, and flat buffers, with views
of them as arrays of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import commsched

from ...core.comparison import require_same
from ...core.device import Device
from ...core.errors import (
    ClosedError,
    CommschedError,
    ConfigError,
    ManifestMismatch,
    TransportError,
    UnsupportedError,
    error_text,
)
from ...core.group import TensorGroup
from ...core.manifest import Manifest
from ...devices import open_device
from .device_copies import to_device, to_host


def format_spec(item: Sequence[Any] | None) -> str:
    """A variable, ``[name, shape, dtype]``, as text for an error; None: there is none."""
    return "nothing more" if item is None else f"'{item[0]}' {item[2]}{item[1]}"


def broadcast_arrays(session: commsched.Session, name: str, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Rank 0's values of ``arrays``, bit for bit. Collective.

    The arrays must have the same shapes and types on all ranks. The results share one piece of memory.
    """
    flat = np.concatenate(
        [np.empty(0, np.uint8), *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)]
    )
    if session.device == "cpu":
        session.broadcast(name, flat.data)
    else:
        flat = _broadcast_on(open_device(session.device), session, name, flat)
    received, start = [], 0
    for array in arrays:
        received.append(flat[start : start + array.nbytes].view(array.dtype).reshape(array.shape))
        start += array.nbytes
    return received


def _broadcast_on(device: Device, session: commsched.Session, name: str, flat: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rank 0's bytes of ``flat``, by way of the device on which the transport sums."""
    memory, stream = device.allocate(len(flat)), device.stream()
    if session.rank == 0:
        to_device(device, stream, memory, flat.data)
    session.broadcast(name, memory, 0, device)
    return np.frombuffer(to_host(device, stream, memory), np.uint8)


def gather_alike(session: commsched.Session, doing: str, value: Any, advice: str) -> list[Any]:
    """Return ``session.gather(value)``, and require that all ranks make this call for the same purpose. Collective. Raises
    ManifestMismatch if another rank makes another collective call.

    ``doing`` is the purpose as the error says it, "rank 1 <doing>"; the message ends with ``advice``.
    """
    values = []
    for rank, theirs in enumerate(session.gather({"doing": doing, "value": value})):
        does = theirs.get("doing") if isinstance(theirs, dict) else None
        if does != doing:
            raise ManifestMismatch(f"rank {rank} {does or 'does something else'} while rank {session.rank} {doing}: {advice}")
        values.append(theirs["value"])
    return values


def require_same_owner(
    session: commsched.Session, number: int | None, what: str, kind: str, require_end: Callable[[], None] | None = None
) -> None:
    """Require that a new ``kind``, such as a trainer, takes its parameters from the same earlier one on all ranks, or from none
    (``number`` is None). Collective.

    A rank that trains on with the earlier one does not come here. ``require_end`` waits until all ranks have ended with it, as
    this rank has told them, and raises what is wrong. It runs in a thread beside the gather, which would not end then. Without
    it, or if a rank has no earlier one, such a rank and this one wait for each other.

    Raises:
        ConfigError: ranks take the parameters from different ones. If the earlier one has made a step, it cannot go on, and the
            thread waits until the session ends.
        ManifestMismatch: see :func:`gather_alike`.
        CommschedError: from ``require_end``.
    """
    failures: list[BaseException] = []
    gathered = threading.Event()  # the gather alone needs the report

    def wait(require_end: Callable[[], None]) -> None:
        try:
            require_end()
        except BaseException as error:
            failures.append(error)
            if not gathered.is_set() and not isinstance(error, UnsupportedError | ClosedError):
                session.report(error if isinstance(error, CommschedError) else TransportError(error_text(error)))

    def owner(its: int | None) -> str:
        return "no other one" if its is None else f"an earlier {kind}"

    thread = threading.Thread(target=wait, args=(require_end,), name="commsched-takes-over", daemon=True)
    if require_end is not None:
        thread.start()
    try:
        numbers = gather_alike(session, f"makes a {kind}", number, "make it on all ranks, at the same place in the script")
    finally:
        gathered.set()
    require_same(
        numbers,
        lambda different: f"{what} to {different.text(owner)}; make another one of the same on all ranks, or detach that one",
        ConfigError,
    )
    if require_end is not None:
        thread.join()
    if failures:
        raise failures[0]


def _allocate(nbytes: int) -> tuple[Any, memoryview]:
    memory = np.zeros(nbytes, np.uint8)
    return memory, memory.data


def register_flat(
    session: commsched.Session,
    manifest: Manifest,
    *,
    as_dtype: Callable[[str], Any] = np.dtype,
    allocate: Callable[[int], tuple[Any, Any]] = _allocate,
    device: Device | None = None,
    may_freeze: bool = False,
) -> tuple[TensorGroup, list[Any]]:
    """Register the tensors of ``manifest`` in new flat buffers of zeros. Collective. Return the group, and for each tensor a
    view of its place in a flat buffer. Raises as ``Session.register``.

    ``as_dtype`` returns the engine's type for a dtype's name, because numpy does not know all types that engines have, such as
    bfloat16. ``allocate`` returns so many zero bytes, as an array of uint8 and as ``Session.register`` takes them with
    ``device``; by default they are a numpy array. ``may_freeze`` is as for ``Session.register``.
    """
    flat = {dtype: allocate(nbytes) for dtype, nbytes in manifest.buffer_bytes.items()}
    views = []
    for tensor, spec in enumerate(manifest.tensors):
        values, start = flat[spec.dtype][0], manifest.offset(tensor)
        views.append(values[start : start + spec.nbytes].view(as_dtype(spec.dtype)).reshape(spec.shape))
    buffers = {dtype: buffer for dtype, (_, buffer) in flat.items()}
    return session.register(manifest, buffers, device, may_freeze=may_freeze), views
