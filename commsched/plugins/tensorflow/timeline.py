"""Spans of a model's forward and backward for the trace. Used only if a trace is wanted, because it adds operations to
graphs."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any
from weakref import WeakMethod

import keras
import tensorflow as tf

from ...core.interfaces import Observer
from .gate import Signals

#: The tensor attribute in which Keras notes which of the tensor's time steps count.
_MASK = "_keras_mask"


class Timeline:
    """Reports spans of ``model``'s layers to ``observer``, until :meth:`close`.

    A span of forward begins when the input of a layer is computed, and ends when its output is. So it includes the wait for the
    layer's weights. Spans exist for layers with variables of their own, and for recurrent layers. A span of backward lies
    between two submissions of gradients. The first one begins with the end of forward.
    """

    def __init__(self, observer: Observer, signals: Signals, model: Any) -> None:
        self._observer = observer
        self._signals = signals
        self._lock = threading.Lock()
        self._began: dict[str, float] = {}  # by layer name, in monotonic seconds
        self._since = monotonic()
        self._layers = list(_layers_with_variables(model))
        for layer in self._layers:
            # An attribute of the object is found before the method of the class. It is neither saved nor copied with the layer.
            layer.call = self._watched(layer.path or layer.name, layer.call)

    def submitted(self, name: str) -> None:
        """Note that the gradients ``name`` were submitted. Any thread."""
        with self._lock:
            self._tell("backward", name, self._since)
            self._since = monotonic()

    def close(self) -> None:
        for layer in self._layers:
            del layer.call

    def _layer_begins(self, name: str) -> None:
        with self._lock:
            self._began[name] = monotonic()

    def _layer_ends(self, name: str) -> None:
        with self._lock:
            if name in self._began:
                self._tell("forward", name, self._began.pop(name))
            self._since = monotonic()

    def _tell(self, track: str, name: str, began: float) -> None:
        self._observer.on_span(track, name, began, monotonic())

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        begins, ends = (self._operation(method, name) for method in (self._layer_begins, self._layer_ends))

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _with_first_tensor(begins, (args, kwargs))
            return _with_first_tensor(ends, call(*args, **kwargs))

        return watched

    def _operation(self, method: Callable[[str], None], name: str) -> Callable[[tf.Tensor], tf.Tensor]:
        """A function that returns its tensor. It adds a call of ``method`` that runs once the tensor is computed, and before
        any operation uses the result."""
        known = WeakMethod(method)  # weak, because TensorFlow keeps an operation's Python function until the process ends
        signals = self._signals

        def told(_: Any) -> bool:
            alive = known()
            if alive is not None:
                alive(name)
            return True

        # A function that reads a variable: see step.py.
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def tell(element: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([signals.closed.read_value()]):
                return tf.numpy_function(told, [element], tf.bool)

        def pass_on(tensor: tf.Tensor) -> tf.Tensor:
            if tf.executing_eagerly():
                told(tensor)
                return tensor
            with tf.control_dependencies([tell(tf.reshape(tf.stop_gradient(tensor), [-1])[:1])]):
                passed = tf.identity(tensor)
            if hasattr(tensor, _MASK):
                setattr(passed, _MASK, getattr(tensor, _MASK))
            return passed

        return pass_on


def _layers_with_variables(model: Any) -> Iterator[Any]:
    layers = list(model._flatten_layers())
    recurrent = [layer for layer in layers if isinstance(layer, keras.layers.RNN)]
    cells = {id(inner) for layer in recurrent for inner in layer.cell._flatten_layers()}  # these run once in each time step
    for layer in layers:
        wanted = isinstance(layer, keras.layers.RNN) or (layer._trainable_variables and id(layer) not in cells)
        if wanted and "call" not in vars(layer):  # otherwise another optimizer's timeline watches the layer already
            yield layer


def _with_first_tensor(change: Callable[[tf.Tensor], tf.Tensor], structure: Any) -> Any:
    """``structure`` with its first tensor changed, if there is one."""
    values: Sequence[Any] = tf.nest.flatten(structure)
    for place, value in enumerate(values):
        if isinstance(value, tf.Tensor) and not keras.backend.is_keras_tensor(value):
            return tf.nest.pack_sequence_as(structure, [*values[:place], change(value), *values[place + 1 :]])
    return structure
