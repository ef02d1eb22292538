"""ScheduledOptimizer: the user's optimizer, which makes its updates when averages arrive, while the next forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import keras
import tensorflow as tf

import commsched

from ...core.errors import ConfigError, UnsupportedError
from .schedule import Schedule
from .update import learning_rate_now


class ScheduledOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras has no types
    """Averages the gradients of ``model`` over all ranks, front layers first, and lets the next forward start layer by layer.

    ``optimizer`` is any Keras optimizer over the trainable variables of ``model``; it makes the updates. After this line
    ``model.compile`` and ``fit`` stay as they are, and so does a training step of your own, eager or a ``tf.function``::

        optimizer = ScheduledOptimizer(optimizer, model)

    The returned object is ``optimizer`` itself. Its class is replaced by a subclass of its own class and of ScheduledOptimizer.
    Every rank begins with rank 0's weights and optimizer state. ``apply`` and ``apply_gradients`` submit each gradient as soon
    as it is computed, and wait for no average. The first read of a variable waits until that variable is updated. With one
    rank, or with ``COMMSCHED_DISABLE=1``, it is the plain optimizer.

    Args:
        optimizer: the user's optimizer.
        model: a built Keras model: with a given input shape, by ``model.build``, or called once.
        session: a session other than the one that ``commsched.init()`` returns.
        per_parameter: whether ``optimizer`` treats each variable independently of the others, so that it may be called for one.
            If not, ``apply`` waits for all averages. ``None`` means yes for the optimizers of Keras that are known to do so,
            and no for others.

    Raises:
        ConfigError: the arguments are not an optimizer and a model of Keras, or belong to another ScheduledOptimizer.
        UnsupportedError: the optimizer, the model or a variable's type is not supported; says which.
        ManifestMismatch: the ranks' models or optimizers differ; names the difference.
        CommschedError: from ``commsched.init()``.
    """

    def __new__(cls, optimizer: Any, model: Any, **_: Any) -> Any:
        if keras.backend.backend() != "tensorflow":
            raise UnsupportedError(f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow")
        if isinstance(optimizer, keras.Model) and isinstance(model, keras.optimizers.Optimizer):
            raise ConfigError("the optimizer comes first: ScheduledOptimizer(optimizer, model)")
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigError(f"{optimizer!r} is not an optimizer of Keras")
        if not isinstance(model, keras.Model):
            raise ConfigError(f"{model!r} is not a model of Keras")
        if isinstance(optimizer, ScheduledOptimizer):
            if not optimizer.is_over:
                raise ConfigError("this optimizer is a ScheduledOptimizer already")
            optimizer.__class__ = _own_class(type(optimizer))
        own: Any = type(optimizer)
        if own.apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
            raise UnsupportedError(
                f"{own.__name__} has an apply_gradients of its own, which would see the gradients of one rank: override apply"
            )
        optimizer.__class__ = _scheduled_class(own)
        return optimizer

    def __init__(
        self, optimizer: Any, model: Any, *, session: commsched.Session | None = None, per_parameter: bool | None = None
    ) -> None:
        # Keras's ``__init__`` is not called, because this object is an initialised optimizer already.
        self._schedule: Schedule | None = None
        self._detached = False
        try:
            session = session or commsched.init()
            if session.world_size == 1:
                return
            if tf.distribute.has_strategy():
                raise UnsupportedError(
                    f"{type(tf.distribute.get_strategy()).__name__} is active: it distributes training itself; use one or "
                    "the other"
                )
            if not model.built or not model.trainable_variables:
                raise UnsupportedError(
                    f"the model '{model.name}' has no trainable variables yet, so ranks cannot begin alike: call model.build() "
                    "or the model before its optimizer is given to ScheduledOptimizer"
                )
            if not self.built:
                self.build(model.trainable_variables)
            self._schedule = Schedule(session, _own_class(type(self)), self, model, self._trainable_variables, per_parameter)
        except BaseException:
            self.__class__ = _own_class(type(self))
            raise

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Like Keras's ``apply``, but gradients are averaged.

        Raises:
            UnsupportedError: the use is refused (see docs/tensorflow.md); the message names the reason.
            CommschedError: the session failed or was closed. From a graph, TensorFlow raises an error of its own, which names
                this error.
        """
        if self._schedule is None:
            super().apply(grads, trainable_variables)
            return
        gradients = list(grads)
        if gradients:
            self._schedule.apply(gradients, self._or_all(trainable_variables))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def average(self, grads: Any, trainable_variables: Any = None) -> list[Any]:
        """Return the averages of gradients over all ranks, for a loop that clips or changes them itself::

            averages = optimizer.average(tape.gradient(loss, model.trainable_variables))
            averages, norm = tf.clip_by_global_norm(averages, 1.0)
            optimizer.apply_averages(averages, model.trainable_variables)

        It waits for all averages, so communication overlaps with backward only. The optimizer must not update each variable
        by itself: ``ScheduledOptimizer(optimizer, model, per_parameter=False)``. With one rank it returns the gradients.

        Args:
            grads: one gradient, of the variable's shape, or ``None`` for each variable.
            trainable_variables: the variables, in the same order; if they are not given, all of the optimizer's.

        Returns:
            The averages in the order of ``grads``, as tensors of the variables' types; ``None`` where no rank has a gradient.

        Raises:
            UnsupportedError, CommschedError: as :meth:`apply`; also if the optimizer updates each variable by itself.
        """
        gradients = list(grads)
        if self._schedule is None or not gradients:
            return gradients
        return self._schedule.average(gradients, self._or_all(trainable_variables))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_averages(self, averages: Any, trainable_variables: Any = None) -> None:
        """Update variables by the optimizer as it is without commsched, from what :meth:`average` has returned.

        The loop must change averages in the same way on all ranks, and may call this or not, if all ranks do alike: ranks that
        differ afterwards end the job when weights are compared.
        """
        if self._schedule is None:
            super().apply(averages, trainable_variables)
        else:
            self._schedule.apply_averages(list(averages), self._or_all(trainable_variables))

    def _or_all(self, variables: Any) -> list[Any]:
        return list(self._trainable_variables if variables is None else variables)

    def apply_plainly(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Apply ``gradients`` by the user's optimizer, without averaging."""
        super().apply(gradients, variables)

    def synchronize(self) -> None:
        """Wait until every update is made.

        Raises:
            CommschedError: the session failed or was closed.
        """
        if self._schedule is not None:
            self._schedule.synchronize()

    def detach(self) -> None:
        """Wait until every update is made, and release the model. Then this is the user's optimizer again, on this rank alone.

        Collective. The model may then be exported, or be given to another ScheduledOptimizer. Functions that were traced for
        training before must be traced again.
        """
        if self._schedule is not None:
            self._schedule.detach()
            self._schedule = None
        self._detached = True

    @property
    def is_over(self) -> bool:
        """Whether it was detached, or its session is closed."""
        return self._detached or (self._schedule is not None and self._schedule.ended)

    @property
    def is_averaging(self) -> bool:
        return self._schedule is not None and not self._schedule.ended

    @property
    def learning_rate(self) -> Any:
        """Like Keras's ``learning_rate``. An update uses the learning rate at the time of its ``apply``."""
        now = learning_rate_now()
        return super().learning_rate if now is None else now

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        _own_class(type(self)).learning_rate.fset(self, value)  # type: ignore[attr-defined]

    @property
    def own_iterations(self) -> Any:
        """The variable that counts calls of ``apply``."""
        return self._iterations

    @property
    def own_learning_rate(self) -> Any:
        """The learning rate's variable, schedule or function."""
        return self._learning_rate

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """A plain optimizer of the user's class, because a copy belongs to no session."""
        own = _own_class(cls)
        return own.from_config(config, custom_objects) if custom_objects else own.from_config(config)  # type: ignore[attr-defined]


@cache
def _scheduled_class(own: type) -> type:
    # Keras saves a model with the name of its optimizer's class. With the own class's name, it loads as the user's optimizer.
    return type(own.__name__, (ScheduledOptimizer, own), {"__module__": own.__module__, "__doc__": own.__doc__})


def _own_class(scheduled: type) -> type:
    """The own class of the user's optimizer."""
    return scheduled.__mro__[2]
