"""Memory of gradients, on the host or on a GPU, and the arrays of a program that runs on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import commsched

from ...core.device import Device, DeviceStream
from ...core.errors import UnsupportedError
from ...core.group import TensorGroup
from ...core.interfaces import Buffer
from ...core.manifest import Manifest
from ...devices import open_device
from ..common.collectives import register_flat
from ..common.device_copies import to_device, to_host

_DLPACK_CPU = 1  # kDLCPU
_ZERO_BYTES = 8  # numbers of programs are no larger

_open_device = cache(open_device)


class DeviceArray:
    """An operand or result of a call from a program that runs on a GPU, as ``stream`` finds it when it gets there.

    A number is read and written as one in numpy's memory: a read waits for the stream, a write does not.
    """

    def __init__(self, device: Device, stream: DeviceStream, array: Any) -> None:
        self.device = device
        self.stream = stream
        self.dtype = np.dtype(array.dtype)
        self._array = array

    @cached_property
    def memory(self) -> Buffer:
        return self.device.view(self._array)  # not earlier: some arrays are of types that cannot be viewed, and never read

    def item(self) -> Any:
        return self.to_host().view(self.dtype).item()

    def __int__(self) -> int:
        return int(self.item())

    def __setitem__(self, at: Any, value: Any) -> None:
        if at is not ...:
            raise TypeError(f"an array on {self.device.name} is written as a whole, not at {at!r}")
        if value == 0 and len(self.memory) <= _ZERO_BYTES:
            self.stream.copy(self.memory, _zero(cast(Hashable, self.device))[: len(self.memory)])
            return
        values = np.full(len(self.memory) // self.dtype.itemsize, value, self.dtype)
        to_device(self.device, self.stream, self.memory, values.view(np.uint8).data)

    def to_host(self, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """The bytes ``[start, stop)``, in the host's memory. Waits for the stream."""
        return np.frombuffer(to_host(self.device, self.stream, self.memory[slice(start, stop)]), np.uint8)


@cache
def _zero(device: Device) -> Buffer:
    return device.allocate(_ZERO_BYTES)


def arrays_of(context: Any, buffers: Sequence[Any]) -> list[Any]:
    """The arguments of a ``buffer_callback`` as numpy arrays, or as :class:`DeviceArray` if the program runs on a GPU."""
    kind, number = buffers[0].__dlpack_device__()
    if kind == _DLPACK_CPU:
        return list(map(np.asarray, buffers))
    device = _open_device(f"cuda:{number}")
    stream = device.current_stream(context.stream)
    return [DeviceArray(device, stream, buffer) for buffer in buffers]


def bytes_of(array: Any, start: int, stop: int) -> memoryview:
    """The bytes ``[start, stop)`` of a numpy array or DeviceArray, in the host's memory."""
    if isinstance(array, DeviceArray):
        return array.to_host(start, stop).data
    view: memoryview = array.reshape(-1).view(np.uint8).data
    return view[start:stop]


class FlatGradients(Protocol):
    """The flat buffers of a ``group``, into which gradients are copied and out of which averages are copied."""

    group: TensorGroup

    def submit(self, tensor: int, gradient: Any) -> None:
        """Copy ``gradient`` to its place, and notify the core that it is there, or will be. Raises UnsupportedError if the
        gradient is not where the flat buffers are, and CommschedError if the session failed."""

    def read(self, tensor: int, into: Any) -> None:
        """Wait until the average is there, and copy it. Raises as :meth:`submit`."""


class HostGradients:
    """See ``FlatGradients``. Arrays are numpy arrays."""

    def __init__(self, session: commsched.Session, manifest: Manifest) -> None:
        self.group, self._views = register_flat(session, manifest, as_dtype=jnp.dtype, may_freeze=True)

    def submit(self, tensor: int, gradient: Any) -> None:
        np.copyto(self._views[tensor], self._here(tensor, gradient))
        self.group.notify_ready(tensor)

    def read(self, tensor: int, into: Any) -> None:
        into = self._here(tensor, into)
        self.group.proxies[tensor].wait()
        np.copyto(into, self._views[tensor])

    def _here(self, tensor: int, array: Any) -> NDArray[Any]:
        if isinstance(array, DeviceArray):
            _refuse(self.group.manifest.tensors[tensor].name, array.device.name, "the CPU")
        return np.asarray(array)


class DeviceGradients:
    """See ``FlatGradients``. Arrays are DeviceArrays within programs, and numpy arrays outside of them."""

    def __init__(self, session: commsched.Session, manifest: Manifest, device: Device) -> None:
        self._device = device
        flat = {dtype: device.allocate(nbytes) for dtype, nbytes in manifest.buffer_bytes.items()}
        self.group = session.register(manifest, flat, device, may_freeze=True)
        self._places = [
            flat[spec.dtype][manifest.offset(tensor) : manifest.offset(tensor) + spec.nbytes]
            for tensor, spec in enumerate(manifest.tensors)
        ]

    def submit(self, tensor: int, gradient: Any) -> None:
        if isinstance(gradient, DeviceArray):
            stream = self._stream_of(tensor, gradient)
            stream.copy(self._places[tensor], gradient.memory)
        else:
            stream = self._device.current_stream()
            values = np.ascontiguousarray(gradient).reshape(-1).view(np.uint8).data
            to_device(self._device, stream, self._places[tensor], values)
        self.group.notify_ready(tensor, stream.record())

    def read(self, tensor: int, into: Any) -> None:
        if isinstance(into, DeviceArray):
            stream = self._stream_of(tensor, into)
            self.group.proxies[tensor].wait(stream)
            stream.copy(into.memory, self._places[tensor])
            return
        stream = self._device.current_stream()
        self.group.proxies[tensor].wait(stream)
        average = np.frombuffer(to_host(self._device, stream, self._places[tensor]), np.uint8)
        into[...] = average.view(into.dtype).reshape(into.shape)

    def _stream_of(self, tensor: int, array: DeviceArray) -> DeviceStream:
        if array.device != self._device:
            _refuse(self.group.manifest.tensors[tensor].name, array.device.name, self._device.name)
        return array.stream


def _refuse(tensor: str, where: str, begun: str) -> None:
    raise UnsupportedError(
        f"the step computes '{tensor}' on {where}, but the training began with parameters on {begun}; "
        "begin anew where the steps run"
    )


def device_at(name: str, session: commsched.Session) -> Device | None:
    """The device of the place ``name``, as :func:`place_of` returns it; None is the host. Raises UnsupportedError if the
    session's transport averages on another device, and ConfigError if cupy is missing."""
    if session.device not in ("cpu", name):
        raise UnsupportedError(
            f"the parameters are on {name}, but the session was opened on {session.device}; "
            f"call commsched.init(device={name!r}) first"
        )
    return None if name == "cpu" else _open_device(name)


def session_for(named: Sequence[tuple[str, Any]]) -> commsched.Session:
    """The session of this process. If this call opens it, it is opened for the GPU of these leaves, if they are on one. Raises
    as ``commsched.init``."""
    try:
        place = place_of([(name, leaf) for name, leaf in named if not isinstance(leaf, jax.core.Tracer)])
    except UnsupportedError:  # with several ranks, who exchanges them refuses them; alone, nobody does
        place = "cpu"
    return commsched.init() if place == "cpu" else commsched.init(device=place)


def place_of(named: Sequence[tuple[str, Any]]) -> str:
    """Where programs with these leaves run: ``cpu``, or ``cuda:0`` with the number of the GPU in this process. Leaves that JAX
    has not put on a device yet go to its default device.

    Raises:
        UnsupportedError: a leaf lies on several devices, or on none of these kinds, or leaves lie on different ones.
    """
    places = {name: _place(name, leaf.devices()) for name, leaf in named if isinstance(leaf, jax.Array) and leaf.committed}
    if not places:
        return _place("a new array", {_default_device()})
    (first, place), *others = places.items()
    for name, other in others:
        if other != place:
            raise UnsupportedError(f"'{first}' lies on {place} and '{name}' on {other}; put all parameters on one device")
    return place


def _place(name: str, devices: set[jax.Device]) -> str:
    [device, *more] = devices
    if more or device.platform not in ("cpu", "gpu", "cuda"):
        where = ", ".join(sorted(str(device) for device in devices))
        raise UnsupportedError(f"'{name}' lies on {where}; the JAX plugin trains on one CPU or CUDA device per rank")
    return "cpu" if device.platform == "cpu" else f"cuda:{device.local_hardware_id}"


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]
