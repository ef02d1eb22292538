"""The plugin of the numpy engine: the shortest example of a plugin. Every plugin does these four things:

(a) it describes the tensors, in forward order, and puts their gradients into one flat buffer per dtype;
(b) it reports each gradient as soon as backward has written it (``notify_ready``);
(c) it makes each parameter's update before anything reads the parameter (``proxy.wait``, then the update, before each layer);
(d) it updates with the user's own optimizer, restricted to the layers whose averages are complete.

The arrays may be those of another library with numpy's interface, on a device (cupy's, say). There the host only queues work:
(b) gives the event behind the work that writes the gradient, and (c) lets the stream wait, and not the host.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from time import monotonic
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import commsched

from ...core.device import Device, DeviceStream
from ...core.errors import UnsupportedError
from ...core.interfaces import Buffer
from ...core.manifest import Manifest, TensorSpec, require_equal
from ...devices import open_device
from ..common.collectives import register_flat, require_same_owner
from ..common.device_copies import to_host
from ..common.undo import COPIED_AHEAD, Undo
from ..common.waits import require_may_wait
from ..common.weights_check import WeightsCheck, digest_of, number_in
from .elastic import ElasticPart
from .engine import SGD, Network


class ScheduledOptimizer:
    """Averages the gradients of ``optimizer.network`` over all ranks. The training loop does not change::

        optimizer = ScheduledOptimizer(SGD(network, learning_rate=0.1, momentum=0.9))
        for inputs, labels in batches:                                   # this rank's share of the data
            loss, gradient = softmax_cross_entropy(network.forward(inputs), labels)
            network.backward(gradient)
            optimizer.step()
        optimizer.synchronize()                                          # before reading parameters outside forward

    The constructor replaces the parameters and velocities of every rank by the values of rank 0. ``step`` does not update the
    layers itself. It records an update for each layer, and the next forward makes that update when it reaches the layer.
    Forward therefore runs while the averages of later layers are still being computed. From ``backward`` to the update, a
    layer's ``gradients`` belong to commsched: do not read or write them.

    The constructor is collective: every rank must call it, in the same order. It makes the last updates of an earlier
    ScheduledOptimizer of the same network, which it replaces. Use the optimizer from one thread. Layers may not share arrays.

    Args:
        optimizer: updates one layer at a time, with the hyper-parameters that it has when ``step`` is called.
        session: the running session. The default is the session of ``commsched.init()``.
        device: the device that holds the arrays. The default is that of cupy's arrays, and the host for numpy's.

    Raises:
        ConfigError: the device's library is missing; see ``commsched.devices.open_device``. Or an earlier ScheduledOptimizer
            has the network on some ranks only.
        UnsupportedError: a parameter's dtype, memory layout or device cannot be communicated, or layers share one.
        ManifestMismatch: ranks have different networks. Raised on every rank, before anything has changed.
    """

    def __init__(self, optimizer: SGD, session: commsched.Session | None = None, device: Device | None = None) -> None:
        self._optimizer = optimizer
        self._network = optimizer.network
        self._device = _device_of(self._network) if device is None else device
        self._names = [f"{index} {type(layer).__name__}" for index, layer in enumerate(self._network.layers)]
        self._due: dict[int, SGD] = {}  # outstanding updates: layer -> copy of the optimizer, made when ``step`` was called
        self._undo: Undo[int] | None = None  # by layer; in an elastic job
        self._is_replaced = False
        self._number = 0  # in its session
        self._session = session = session or commsched.init(device="cpu" if self._device is None else self._device.name)
        _refuse_shared_arrays(self._network)
        owner = getattr(self._network.around_forward, "__self__", None)
        self._take_part(session, owner if isinstance(owner, ScheduledOptimizer) else None)

    def _take_part(self, session: commsched.Session, earlier: ScheduledOptimizer | None = None) -> None:
        """Take part in ``session``, and take the network over from ``earlier``. Collective."""
        number = earlier._number if earlier is not None and earlier._session is session else None
        require_same_owner(session, number, "the network belongs", "ScheduledOptimizer")
        require_equal([Manifest.from_record(record) for record in session.gather(self._manifest().to_record())])
        if earlier is not None:
            earlier._leave_network()
        self._session = session
        self._begin_from_root()
        self._register()
        self._network.around_forward = self._around_forward
        self._network.around_backward = self._around_backward
        self._forget = self._session.on_close(self.synchronize)

    def _leave_network(self) -> None:
        """Make the last updates, before another ScheduledOptimizer takes over the network and the gradients of its layers."""
        if not self._session.closed:
            self.synchronize()
            self._forget()
            if not self._group.missing():
                self._group.release()
        self._is_replaced = True

    def step(self) -> None:
        """Record an update for every layer, with the current hyper-parameters.

        Returns at once, unless no forward has run since the last ``step``: then it makes the outstanding updates first.

        Raises:
            UnsupportedError: another ScheduledOptimizer was made for the same network, or this one after backward. Or the last
                backward was broken off, or a parameter was replaced by another array.
            CommschedError: the session failed.
        """
        if self._is_replaced:
            raise UnsupportedError("another ScheduledOptimizer was made for the same network: use that one")
        self._group.require_whole_step()
        for spec, (index, name), parameter in zip(self._group.manifest.tensors, self._slots(), self._parameters):
            if self._network.layers[index].parameters[name] is not parameter:
                raise UnsupportedError(
                    f"parameter '{spec.name}' was replaced by another array, which is not compared between ranks: write into "
                    "the array instead, or make another ScheduledOptimizer"
                )
        self.synchronize()  # does nothing if a forward has run since the last step
        if self._undo is not None:
            self._undo.committed()
        if self._group.step < 0:
            raise UnsupportedError(
                "there was no backward since this ScheduledOptimizer was made: it has no gradients to average"
            )
        then = copy.copy(self._optimizer)  # copies the hyper-parameters; the velocities stay shared
        self._check.begin(self._group.step)
        self._due = dict.fromkeys(range(len(self._network.layers)), then)

    def synchronize(self) -> None:
        """Make all outstanding updates. Afterwards the parameters may be read.

        Raises:
            CommschedError: the session failed.
        """
        for index in sorted(self._due):
            if index in self._due:  # else a signal handler has made it
                self._update(index)

    @property
    def elastic_part(self) -> ElasticPart:
        """``commsched.Elastic`` uses it."""
        return ElasticPart(self)

    # --- (a) describe the tensors ---

    def _slots(self) -> list[tuple[int, str]]:
        """The layer and the name of each parameter, in forward order."""
        return [(index, name) for index, layer in enumerate(self._network.layers) for name in layer.parameters]

    def _manifest(self) -> Manifest:
        parameters = [(f"{index}.{name}", self._network.layers[index].parameters[name]) for index, name in self._slots()]
        return Manifest(tuple(TensorSpec(name, each.shape, each.dtype.name) for name, each in parameters))

    def _register(self) -> None:
        layers, slots, manifest = self._network.layers, self._slots(), self._manifest()
        parameters = [layers[index].parameters[name] for index, name in slots]
        self._group, places = register_flat(
            self._session,
            manifest,
            allocate=partial(self._allocate, parameters),
            device=self._device,
            may_freeze=True,  # ``step`` is called after backward
        )
        self._tensors: list[list[int]] = [[] for _ in layers]
        for tensor, (place, (index, name)) in enumerate(zip(places, slots)):
            layers[index].gradients[name] = place
            self._tensors[index].append(tensor)
        self._parameters = parameters
        self._number, label = number_in(self._session)
        names, nbytes = [spec.name for spec in manifest.tensors], [spec.nbytes for spec in manifest.tensors]
        self._check = WeightsCheck(self._session, names, nbytes, f"weights{label}")

    def _allocate(self, parameters: list[NDArray[Any]], nbytes: int) -> tuple[NDArray[np.uint8], Buffer]:
        device: Any = getattr(parameters[0], "device", None)
        with device if hasattr(device, "__enter__") else nullcontext():  # cupy's zeros_like takes memory of the current one
            flat = np.zeros_like(parameters[0], dtype=np.uint8, shape=(nbytes,))
        return flat, self._bytes_of(flat, "the gradients")

    def _begin_from_root(self) -> None:
        for index, layer in enumerate(self._network.layers):
            for name, parameter in layer.parameters.items():
                self._broadcast(f"{index}.{name}", parameter)
                self._broadcast(f"{index}.{name}.velocity", self._optimizer.velocities[index][name])

    def _broadcast(self, name: str, array: NDArray[Any]) -> None:
        memory = self._bytes_of(array, name)
        if (stream := self._stream()) is not None:
            if self._session.rank != self._session.root:
                array.fill(0)
            stream.synchronize()
        self._session.broadcast(name, memory, self._session.root, self._device)

    def _bytes_of(self, array: NDArray[Any], name: str) -> Buffer:
        """Return the memory of ``array`` as bytes, without a copy."""
        if self._device is not None:
            return self._device.view(array)
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise UnsupportedError(f"tensor '{name}' is not one writable piece of memory; give the layer a contiguous array")
        return array.reshape(-1).view(np.uint8).data

    def _stream(self) -> DeviceStream | None:
        """The stream that computes; None is the host, where work is done when a call returns."""
        return None if self._device is None else self._device.current_stream()

    # --- (b) report written gradients ---

    @contextmanager
    def _around_backward(self, index: int) -> Iterator[None]:
        if index == len(self._network.layers) - 1:
            self._begin_step()
        with self._span("backward", index):
            yield
        if self._tensors[index]:
            stream = self._stream()
            self._group.notify_all_ready(self._tensors[index], None if stream is None else stream.record())

    def _begin_step(self) -> None:
        self._group.require_whole_step()
        self.synchronize()  # if no forward followed the last step: this backward overwrites its averages
        self._group.begin_step(self._stream())

    # --- (c) and (d) update each layer before its forward ---

    @contextmanager
    def _around_forward(self, index: int) -> Iterator[None]:
        if index in self._due:
            self._update(index)
        with self._span("forward", index):
            yield

    def _update(self, index: int) -> None:
        require_may_wait(f"layer {self._names[index]}, whose update is outstanding,")
        if self._undo is not None:
            proxies = [self._group.proxies[tensor] for tensor in self._tensors[index]]
            due = (layer for layer in (index, *self._due) if self._tensors[layer])
            layers = (layer for layer in due if layer == index or self._nbytes(layer) <= COPIED_AHEAD)
            self._undo.copy_while(lambda: not all(proxy.is_open for proxy in proxies), layers)
        for tensor in self._tensors[index]:
            self._group.proxies[tensor].wait(self._stream())
        optimizer = self._due.pop(index, None)
        if optimizer is None:  # a signal handler has run forward during the wait
            return
        try:
            if self._undo is not None:
                self._undo.before_update([index] if self._tensors[index] else [])
        except BaseException:  # out of memory, say
            self._due[index] = optimizer
            raise
        with self._span("update", index):
            optimizer.update(index)
        if self._undo is not None:
            self._undo.after_update()
        for tensor in self._tensors[index]:
            if (part := self._check.wanted(tensor)) is not None:
                weights = self._bytes_of(self._parameters[tensor], "")[slice(*part)]
                self._check.add(tensor, digest_of(self._in_host(weights)))

    def _nbytes(self, layer: int) -> int:
        return sum(self._group.manifest.tensors[tensor].nbytes for tensor in self._tensors[layer])

    def _in_host(self, memory: Buffer) -> memoryview:
        stream = self._stream()
        if self._device is None or stream is None:
            return cast("memoryview", memory)
        return to_host(self._device, stream, memory)  # the host waits, in the few steps that compare weights

    # --- for the timeline ---

    @contextmanager
    def _span(self, track: str, index: int) -> Iterator[None]:
        start = monotonic()
        yield
        if self._session.observer is not None:
            self._session.observer.on_span(track, self._names[index], start, monotonic())


def _refuse_shared_arrays(network: Network) -> None:
    """A layer's update would change what another layer's forward is about to read, or has read."""
    seen: dict[str, Any] = {}
    for index, layer in enumerate(network.layers):
        for name, parameter in layer.parameters.items():
            for other, its in seen.items():
                if parameter is its or (isinstance(parameter, np.ndarray) and np.may_share_memory(parameter, its)):
                    raise UnsupportedError(
                        f"parameters '{other}' and '{index}.{name}' share memory; give each an array of its own"
                    )
            seen[f"{index}.{name}"] = parameter


def _device_of(network: Network) -> Device | None:
    for layer in network.layers:
        for parameter in layer.parameters.values():
            if isinstance(parameter, np.ndarray):
                return None
            if hasattr(parameter, "__cuda_array_interface__"):
                return open_device(f"cuda:{parameter.device.id}")
            raise UnsupportedError(
                f"a {type(parameter).__name__} is an array of numpy or cupy on no known device; give device="
            )
    return None
