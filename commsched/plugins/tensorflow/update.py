"""The user's own optimizer, applied to one bundle of variables at a time."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .agreement import numbers_of
from .exchange import Bundle
from .gate import Compiled
from .guard import own_value, unguarded

#: Keras's optimizers whose update of a variable depends on that variable's gradient and state alone. Subclasses do not count:
#: they may do anything.
_ALONE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adafactor,
    keras.optimizers.RMSprop,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Lamb,
)

_local = threading.local()


def why_all_at_once(kind: type, optimizer: Any, per_parameter: bool | None) -> str | None:
    """The reason, as a clause, why ``optimizer`` of class ``kind`` needs all gradients in one call; None if it does not."""
    if optimizer.global_clipnorm:
        return "global_clipnorm needs the norm of all gradients"
    if optimizer.use_ema:
        return "use_ema averages all variables at once"
    if optimizer.gradient_accumulation_steps:
        return "gradient_accumulation_steps counts calls for all variables"
    if not (kind in _ALONE if per_parameter is None else per_parameter):
        return f"{kind.__name__} may use all gradients at once"
    return None


def learning_rate_now() -> Any:
    """The learning rate of the step whose update this thread is making; None outside an update."""
    return getattr(_local, "learning_rate", None)


def hyper_parameters(optimizer: Any) -> tuple[Any, ...]:
    """The plain values among the attributes of the optimizer, or of another part of an update, in a form that can be compared.
    They are constants of a traced update."""
    return tuple((name, _comparable(value)) for name, value in sorted(getattr(optimizer, "__dict__", {}).items()))


def constraints(variables: Sequence[Any]) -> tuple[Any, ...]:
    """The constraints of ``variables``, in such a form, too: an update applies them."""
    return tuple(
        None if (found := variable.constraint) is None else (_Same(found), hyper_parameters(found)) for variable in variables
    )


class _Same:
    """Stands for one object, whatever equality its class defines."""

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


def _comparable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return value
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return ...  # variables, and other values that are not constants


class Updates:
    """Compiled functions in which ``optimizer`` updates exactly the variables of one bundle.

    They use its hyper-parameters as they are now. The learning rate and the number of the step are arguments of each call.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], learning_rate: tf.TensorSpec) -> None:
        self.numbers = numbers_of(optimizer)
        self._optimizer = optimizer
        self._variables = variables
        self._step = (learning_rate, tf.TensorSpec((), own_value(optimizer.own_iterations).dtype))
        self._functions: dict[Bundle, Compiled] = {}

    def prepare(self, bundles: Sequence[Bundle]) -> None:
        """Compile the functions for ``bundles``. Call it in the user's thread, so that an optimizer's error is raised there."""
        for bundle in bundles:
            if bundle not in self._functions:
                variables = [self._variables[index] for index in bundle]
                size = sum(math.prod(variable.shape) for variable in variables)
                gradient = tf.TensorSpec((size,), own_value(variables[0]).dtype)
                self._functions[bundle] = Compiled(self._make(variables), gradient, *self._step)

    def update(self, bundle: Bundle, gradient: Any, learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
        """Update the variables of ``bundle``, eagerly. ``gradient`` holds their gradients, flat and one after another."""
        self._functions[bundle](tf.constant(gradient), learning_rate, iterations)

    def _make(self, variables: Sequence[Any]) -> Callable[[tf.Tensor, tf.Tensor, tf.Tensor], None]:
        shapes = [tuple(variable.shape) for variable in variables]

        def update(gradient: tf.Tensor, learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
            pieces = tf.split(gradient, [math.prod(shape) for shape in shapes])
            gradients = [tf.reshape(piece, shape) for piece, shape in zip(pieces, shapes)]
            counter = self._optimizer.own_iterations
            _local.learning_rate = learning_rate
            try:
                # In the scope, Keras's own assignments (the counter, a constraint's result) go to the scope. The optimizer's
                # assignments go to the variables.
                with unguarded(), keras.StatelessScope(state_mapping=[(counter, iterations)]) as scope:
                    self._optimizer.apply_plainly(gradients, variables)
                    # The scope identifies the assigned variables by identity.
                    known = {id(each): each for each in [*variables, *self._optimizer.variables] if each is not counter}
                    assigned = {key: scope.get_current_value(each) for key, each in known.items()}
                with unguarded():
                    for key, value in assigned.items():
                        if value is not None:
                            known[key].value.assign(value)
            finally:
                _local.learning_rate = None

        return update
