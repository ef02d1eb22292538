"""The user's own optimizer, narrowed to one variable."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .guard import own_value, unguarded

#: Keras's optimizers whose update of a variable depends on that variable's gradient and state alone. Of these exactly: a
#: subclass may do anything.
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
    """Why ``optimizer``, of class ``kind``, must be given all gradients in one call, as a clause; None: it need not."""
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
    """Within an update, the learning rate of the step that it belongs to; else None."""
    return getattr(_local, "learning_rate", None)


def hyper_parameters(optimizer: Any) -> tuple[Any, ...]:
    """The plain values among the optimizer's attributes: what a traced update has as constants."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(optimizer).items())
        if value is None or isinstance(value, bool | int | float | str | np.generic)
    )


class Updates:
    """One compiled function for each variable that lets ``optimizer`` update exactly this one, with its hyper-parameters as
    they are now, and the learning rate and the number of the step that it is called with.

    Made in the user's thread: an optimizer that raises, raises there.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], learning_rate: tf.TensorSpec) -> None:
        iterations = tf.TensorSpec((), own_value(optimizer.own_iterations).dtype)
        self._optimizer = optimizer
        self._functions = []
        for variable in variables:
            gradient = tf.TensorSpec(tuple(variable.shape), variable.dtype)
            function = tf.function(self._make(variable), autograph=False)
            with tf.init_scope():
                self._functions.append(function.get_concrete_function(gradient, learning_rate, iterations))

        self._captures = [list(function.captured_inputs) for function in self._functions]

    def update(self, index: int, gradient: Any, learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
        """The variable with this ``index``. Eagerly."""
        # As calling the function does, at a fifth of the time, which is Python's.
        tf.raw_ops.StatefulPartitionedCall(
            args=[tf.constant(gradient), learning_rate, iterations, *self._captures[index]], Tout=[], f=self._functions[index]
        )

    def _make(self, variable: Any) -> Any:
        def update(gradient: tf.Tensor, learning_rate: tf.Tensor, iterations: tf.Tensor) -> None:
            counter = self._optimizer.own_iterations
            _local.learning_rate = learning_rate
            try:
                # Within, Keras assigns to the scope what it assigns by itself (the counter, a constraint's result); what
                # optimizers assign goes to the variables.
                with unguarded(), keras.StatelessScope(state_mapping=[(counter, iterations)]) as scope:
                    self._optimizer.apply_plainly([gradient], [variable])
                    # The scope knows by identity what was assigned.
                    known = {id(each): each for each in [variable, *self._optimizer.variables] if each is not counter}
                    assigned = {key: scope.get_current_value(each) for key, each in known.items()}
                with unguarded():
                    for key, value in assigned.items():
                        if value is not None:
                            known[key].value.assign(value)
            finally:
                _local.learning_rate = None

        return update
