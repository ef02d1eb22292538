"""The plugin of the numpy engine: the shortest example of a plugin. Every plugin does these four things:

(a) it describes the tensors, in forward order, and puts their gradients into one flat buffer per dtype;
(b) it reports each gradient as soon as backward has written it (``notify_ready``);
(c) it makes each parameter's update before anything reads the parameter (``proxy.wait``, then the update, before each layer);
(d) it updates with the user's own optimizer, restricted to the layers whose averages are complete.
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
from ..common.collectives import register_flat
from ..common.weights_check import WeightsCheck, digest_of, number_in
from .engine import SGD


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

    The constructor is collective: every rank must call it, in the same order. Use the optimizer from one thread.

    Args:
        optimizer: updates one layer at a time, with the hyper-parameters that it has when ``step`` is called.
        session: the running session. The default is the session of ``commsched.init()``.

    Raises:
        UnsupportedError: a parameter's dtype or memory layout cannot be communicated.
        ManifestMismatch: ranks have different networks. Raised on every rank. Parameters before the first that differs may
            already have the values of rank 0.
    """

    def __init__(self, optimizer: SGD, session: commsched.Session | None = None) -> None:
        self._session = commsched.init() if session is None else session
        self._optimizer = optimizer
        self._network = optimizer.network
        self._names = [f"{index} {type(layer).__name__}" for index, layer in enumerate(self._network.layers)]
        self._begin_from_rank_0()
        self._register()
        self._due: dict[int, SGD] = {}  # outstanding updates: layer -> copy of the optimizer, made when ``step`` was called
        self._network.around_forward = self._around_forward
        self._network.around_backward = self._around_backward
        self._session.on_close(self.synchronize)

    def step(self) -> None:
        """Record an update for every layer, with the current hyper-parameters.

        Returns at once, unless no forward has run since the last ``step``: then it makes the outstanding updates first.

        Raises:
            CommschedError: the session failed.
        """
        self.synchronize()  # does nothing if a forward has run since the last step
        then = copy.copy(self._optimizer)  # copies the hyper-parameters; the velocities stay shared
        self._check.begin(self._group.step)
        self._due = dict.fromkeys(range(len(self._network.layers)), then)

    def synchronize(self) -> None:
        """Make all outstanding updates. Afterwards the parameters may be read.

        Raises:
            CommschedError: the session failed.
        """
        for index in sorted(self._due):
            self._update(index)

    # --- (a) describe the tensors ---

    def _register(self) -> None:
        layers = self._network.layers
        slots = [(index, name) for index, layer in enumerate(layers) for name in layer.parameters]
        specs = []
        for index, name in slots:
            parameter = layers[index].parameters[name]
            specs.append(TensorSpec(f"{index}.{name}", parameter.shape, parameter.dtype.name))
        self._group, places = register_flat(self._session, Manifest(tuple(specs)))
        self._tensors: list[list[int]] = [[] for _ in layers]
        for tensor, (place, (index, name)) in enumerate(zip(places, slots)):
            layers[index].gradients[name] = place
            self._tensors[index].append(tensor)
        self._parameters = [layers[index].parameters[name] for index, name in slots]
        _, label = number_in(self._session)
        names, nbytes = [spec.name for spec in specs], [spec.nbytes for spec in specs]
        self._check = WeightsCheck(self._session, names, nbytes, f"weights{label}")

    def _begin_from_rank_0(self) -> None:
        for index, layer in enumerate(self._network.layers):
            for name, parameter in layer.parameters.items():
                self._session.broadcast(f"{index}.{name}", _bytes_of(parameter, f"{index}.{name}"))
                velocity = self._optimizer.velocities[index][name]
                self._session.broadcast(f"{index}.{name}.velocity", _bytes_of(velocity, f"{index}.{name}.velocity"))

    # --- (b) report written gradients ---

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
        if self._group.step >= 0 and missing:  # the other ranks wait for these gradients: to continue would hang
            raise RuntimeError(f"backward of step {self._group.step} was broken off: {missing} gradients were never written")
        self.synchronize()  # if no forward followed the last step: this backward overwrites its averages
        self._group.begin_step()

    # --- (c) and (d) update each layer before its forward ---

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
        for tensor in self._tensors[index]:
            if (part := self._check.wanted(tensor)) is not None:
                weights = self._parameters[tensor].reshape(-1).view(np.uint8).data
                self._check.add(tensor, digest_of(weights[slice(*part)]))

    # --- for the timeline ---

    @contextmanager
    def _span(self, track: str, index: int) -> Iterator[None]:
        start = monotonic()
        yield
        if self._session.observer is not None:
            self._session.observer.on_span(track, self._names[index], start, monotonic())


def _bytes_of(array: NDArray[Any], name: str) -> memoryview:
    """Return a writable view of the memory of ``array`` as bytes, without a copy."""
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise UnsupportedError(f"tensor '{name}' is not one writable piece of memory; give the layer a contiguous array")
    return array.reshape(-1).view(np.uint8).data
