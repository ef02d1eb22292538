"""One step of training, eagerly or as operations of the graph that is being traced.

Each gradient is handed over by an operation that depends on that gradient alone, so while backward runs. In a graph, each group
of operations is a function of its own whose inputs say what it uses: TensorFlow then keeps its order with respect to those
and to nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from ...core.errors import UnsupportedError
from .exchange import GradientExchange
from .gate import touch
from .on_host import on_host
from .update import Updates
from .updater import Updater

#: By index of variable; a variable without a gradient is missing.
Gradients = Mapping[int, tf.Tensor]


class Step:
    """The operations of a step, for the variables of ``updater``. ``iterations`` is what counts deferred steps."""

    def __init__(self, exchange: GradientExchange, updater: Updater, paths: Sequence[str], iterations: tf.Variable) -> None:
        self._iterations = iterations
        self._exchange = exchange
        self._updater = updater
        self._paths = paths
        self._begin = tf.function(self._begin_in_graph, autograph=False)
        self._hand_over = [tf.function(self._make_hand_over(index), autograph=False) for index in range(len(paths))]
        self._commits: dict[Updates, Any] = {}

    def deferred(self, gradients: Gradients, updates: Updates, learning_rate: tf.Tensor) -> None:
        """Average ``gradients``; each variable is updated when its average is there. Waits for no average of this step."""
        if tf.executing_eagerly():
            self._updater.synchronize()
            self._hand_over_eagerly(gradients, learning_rate)
            self._commit_on_host(updates, learning_rate)
            return
        handed_over = self._hand_over_in_graph(gradients, learning_rate, all_at_once=False)
        if updates not in self._commits:
            self._commits[updates] = tf.function(self._make_commit(len(self._commits)), autograph=False)
        with tf.control_dependencies(handed_over):
            self._commits[updates](learning_rate)

    def averages(self, gradients: Gradients, learning_rate: tf.Tensor) -> dict[int, tf.Tensor]:
        """Average ``gradients``; waits for all. Once they are used, call :meth:`end`.

        Raises:
            UnsupportedError: some ranks have a gradient that others have not. From a graph, as TensorFlow's ``UnknownError``.
            CommschedError: the session failed. From a graph, as TensorFlow's ``InvalidArgumentError``.
        """
        indices = sorted(gradients)
        if tf.executing_eagerly():
            self._hand_over_eagerly(gradients, learning_rate)
            for index in range(len(self._paths)):
                self._exchange.wait(index)
            return dict(zip(indices, map(tf.constant, self._copies(indices))))
        collect = tf.function(self._make_collect(indices, [gradients[index].dtype for index in indices]), autograph=False)
        with tf.control_dependencies(self._hand_over_in_graph(gradients, learning_rate, all_at_once=True)):
            averages = collect()
        return {index: tf.ensure_shape(average, gradients[index].shape) for index, average in zip(indices, averages)}

    def end(self, changed: Sequence[tf.Variable]) -> None:
        """All updates of the step are made, of the variables ``changed``; in a graph, by what was added to it so far."""
        if tf.executing_eagerly():
            self._exchange.end()
            return

        def end() -> None:
            for variable in changed:
                touch(variable)
            on_host(self._exchange.end, [])

        tf.function(end, autograph=False)()

    def _backward_order(self, gradients: Gradients) -> list[int]:
        return [index for index in reversed(self._exchange.forward_order) if index in gradients]

    def _has_gradient(self, gradients: Gradients) -> list[bool]:
        return [index in gradients for index in range(len(self._paths))]

    def _copies(self, indices: Sequence[int]) -> list[Any]:
        """Averages of exactly the variables ``indices``, of which this rank has gradients."""
        for index, path in enumerate(self._paths):
            if 0 < self._exchange.share(index) < 1:
                raise UnsupportedError(
                    f"only some ranks have a gradient of '{path}', and this optimizer updates all variables at once; have "
                    "every rank use it in each step"
                )
        averages = [self._exchange.average(index) for index in indices]
        return [average.copy() for average in averages if average is not None]

    # --- eagerly ---

    def _hand_over_eagerly(self, gradients: Gradients, learning_rate: tf.Tensor) -> None:
        self._exchange.begin(self._has_gradient(gradients), float(learning_rate))
        for index in self._backward_order(gradients):
            self._exchange.hand_over(index, gradients[index].numpy())

    # --- in graphs ---

    def _hand_over_in_graph(self, gradients: Gradients, learning_rate: tf.Tensor, all_at_once: bool) -> list[tf.Tensor]:
        """What is to run after all are handed over must depend on what is returned."""
        order = self._backward_order(gradients)
        with tf.control_dependencies([gradients[order[0]]]):  # not before: a graph may end without a step, as its input has
            begun = self._begin(tf.constant(self._has_gradient(gradients)), learning_rate, all_at_once)
        with tf.control_dependencies([begun]):
            return [self._hand_over[index](gradients[index]) for index in order] + [begun]

    def _begin_in_graph(self, has_gradient: tf.Tensor, learning_rate: tf.Tensor, all_at_once: bool) -> tf.Tensor:
        """Once all updates of the step before are made."""
        wait = self._updater.arrived if all_at_once else self._updater.all_open
        with tf.control_dependencies([wait.add()]):
            done = on_host(self._begin_on_host, [has_gradient, learning_rate, all_at_once])
        with tf.control_dependencies([done]):
            return tf.constant(True)

    def _begin_on_host(self, has_gradient: Any, learning_rate: Any, all_at_once: Any) -> None:
        self._exchange.begin(has_gradient, float(learning_rate))
        if all_at_once:
            self._updater.await_all()

    def _make_hand_over(self, index: int) -> Any:
        def hand_over(gradient: tf.Tensor) -> tf.Tensor:
            # Reads a variable, so that TensorFlow does not take it for something that follows all other such operations.
            with tf.control_dependencies([self._updater.signals.check()]):
                done = on_host(self._exchange.hand_over, [gradient], first=(index,))
            with tf.control_dependencies([done]):
                return tf.constant(True)

        return hand_over

    def _commit_on_host(self, updates: Updates, learning_rate: Any) -> None:
        # Counted here, and not by an operation of its own: that might run, or not, in a graph that ends by an error.
        self._updater.commit(updates, tf.convert_to_tensor(learning_rate), self._iterations.read_value())
        self._iterations.assign_add(1)
        self._exchange.end()

    def _commit_numbered(self, number: int, learning_rate: Any) -> None:
        self._commit_on_host(list(self._commits)[number], learning_rate)

    def _make_commit(self, number: int) -> Any:
        updater = self._updater

        def commit(learning_rate: tf.Tensor) -> None:
            for variable in [
                *(gate.variable for gate in updater.gates),
                *updater.state,
                updater.signals.closed,
                self._iterations,
            ]:
                touch(variable)
            on_host(self._commit_numbered, [learning_rate], first=(number,))

        return commit

    def _make_collect(self, indices: Sequence[int], dtypes: Sequence[tf.DType]) -> Any:
        def collect() -> Any:
            with tf.control_dependencies([self._updater.arrived.add()]):
                return on_host(self._copies, [], dtypes, first=(indices,))

        return collect
