"""The plugin of the numpy engine, and the shortest example of one. Every plugin does these four things:

(a) it describes the tensors, in forward order, and puts their gradients into one flat buffer per dtype;
(b) it tells when a gradient has been written (``notify_ready``);
(c) it lets nothing read a parameter before its update is in place (``proxy.wait``, then the update, before each layer);
(d) it updates with the user's own optimizer, narrowed to what is done.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

import commsched

from ...core.errors import UnsupportedError
from ...core.manifest import Manifest, TensorSpec
from ..flat import lay_out
from .engine import SGD


class ScheduledOptimizer:
    """Averages the gradients of ``optimizer.network`` over all ranks; the training loop stays as it was::

        optimizer = ScheduledOptimizer(SGD(network, learning_rate=0.1, momentum=0.9))
        for inputs, labels in batches:                                   # this rank's share of the data
            loss, gradient = softmax_cross_entropy(network.forward(inputs), labels)
            network.backward(gradient)
            optimizer.step()
        optimizer.synchronize()                                          # before reading parameters outside forward

    Parameters and velocities become those of rank 0. ``step`` only orders the updates: each layer's is made when the next
    forward reaches the layer, so that forward runs while the averages of later layers are still on their way. From
    ``backward`` to the update a layer's ``gradients`` belong to commsched.

    Making one is collective: every rank does, in the same order. To be used from one thread.

    Args:
        optimizer: updates one layer at a time; its hyper-parameters count as they are when ``step`` is called.
        session: the running session; by default that of ``commsched.init()``.

    Raises:
        UnsupportedError: a parameter's dtype or memory layout cannot be communicated.
        ManifestMismatch: ranks have different networks; raised on every rank, before any data moves.
    """

    def __init__(self, optimizer: SGD, session: commsched.Session | None = None) -> None:
        self._session = commsched.init() if session is None else session
        self._optimizer = optimizer
        self._network = optimizer.network
        self._names = [f"{index} {type(layer).__name__}" for index, layer in enumerate(self._network.layers)]
        self._begin_from_rank_0()
        self._register()
        self._due: dict[int, SGD] = {}  # layer -> the optimizer as it was when its update was ordered
        self._network.around_forward = self._around_forward
        self._network.around_backward = self._around_backward
        self._session.on_close(self.synchronize)

    def step(self) -> None:
        """Order the update of every layer, with the hyper-parameters of this moment. Returns at once."""
        self.synchronize()  # nothing is due, unless no forward came since the last step
        then = copy.copy(self._optimizer)  # its numbers as they are now; the velocities stay shared
        self._due = dict.fromkeys(range(len(self._network.layers)), then)

    def synchronize(self) -> None:
        """Make all updates ordered so far; afterwards the parameters may be read.

        Raises:
            CommschedError: the session failed.
        """
        for index in sorted(self._due):
            self._update(index)

    # --- (a) ---

    def _register(self) -> None:
        layers = self._network.layers
        slots = [(index, name) for index, layer in enumerate(layers) for name in layer.parameters]
        specs = []
        for index, name in slots:
            parameter = layers[index].parameters[name]
            specs.append(TensorSpec(f"{index}.{name}", parameter.shape, parameter.dtype.name))
        manifest = Manifest(tuple(specs))
        buffers, places = lay_out(manifest)
        self._tensors: list[list[int]] = [[] for _ in layers]
        for tensor, (place, (index, name)) in enumerate(zip(places, slots)):
            layers[index].gradients[name] = place
            self._tensors[index].append(tensor)
        self._group = self._session.register(manifest, buffers)

    def _begin_from_rank_0(self) -> None:
        for index, layer in enumerate(self._network.layers):
            for name, parameter in layer.parameters.items():
                self._session.broadcast(f"{index}.{name}", _bytes_of(parameter, f"{index}.{name}"))
                velocity = self._optimizer.velocities[index][name]
                self._session.broadcast(f"{index}.{name}.velocity", _bytes_of(velocity, f"{index}.{name}.velocity"))

    # --- (b) ---

    @contextmanager
    def _around_backward(self, index: int) -> Iterator[None]:
        if index == len(self._network.layers) - 1:
            self._begin_step()
        with self._span("backward", index):
            yield
        for tensor in self._tensors[index]:
            self._group.notify_ready(tensor)

    def _begin_step(self) -> None:
        missing = len(self._group.manifest.tensors) - len(self._group.notified)
        if self._group.step >= 0 and missing:  # the other ranks wait for these: going on could only hang
            raise RuntimeError(f"backward of step {self._group.step} was broken off: {missing} gradients were never written")
        self.synchronize()  # of a step that no forward followed: its averages are about to be overwritten
        self._group.begin_step()

    # --- (c) and (d) ---

    @contextmanager
    def _around_forward(self, index: int) -> Iterator[None]:
        if index in self._due:
            self._update(index)
        with self._span("forward", index):
            yield

    def _update(self, index: int) -> None:
        for tensor in self._tensors[index]:
            self._group.proxies[tensor].wait()
        with self._span("update", index):
            self._due.pop(index).update(index)

    # --- for the timeline ---

    @contextmanager
    def _span(self, track: str, index: int) -> Iterator[None]:
        start = monotonic()
        yield
        if self._session.observer is not None:
            self._session.observer.on_span(track, self._names[index], start, monotonic())


def _bytes_of(array: NDArray[Any], name: str) -> memoryview:
    """The memory of ``array`` itself as bytes, to be written to."""
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise UnsupportedError(f"tensor '{name}' is not one writable piece of memory; give the layer a contiguous array")
    return array.reshape(-1).view(np.uint8).data
