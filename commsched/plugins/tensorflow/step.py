"""One training step, eagerly or as operations of the graph that is being traced.

In a graph, an operation that depends only on the gradients of one bundle submits them, so it runs while backward does. Each
group of operations is a function of its own, whose inputs say which variables it uses. TensorFlow then keeps its order with
respect to operations on these variables, and to no others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakMethod

import tensorflow as tf

from ...core.errors import ClosedError, UnsupportedError
from .agreement import Agreement
from .exchange import Bundle, GradientExchange
from .gate import touch
from .update import Updates
from .updater import Updater

#: By index of variable; a variable without a gradient is missing.
Gradients = Mapping[int, tf.Tensor]


class Step:
    """The operations of a step, for the variables of ``updater``.

    A step is *deferred* if its updates are made when their averages arrive. ``iterations`` counts deferred steps.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        updater: Updater,
        agreement: Agreement,
        paths: Sequence[str],
        iterations: tf.Variable,
    ) -> None:
        self._agreement = agreement
        self._iterations = iterations
        self._exchange = exchange
        self._updater = updater
        self._paths = paths
        self._begin = tf.function(self._begin_in_graph, autograph=False)
        self._numbers: list[Mapping[str, Any]] = []  # by number of a traced step: the optimizer's numbers at tracing
        self._commits: dict[tuple[Updates, tuple[Bundle, ...]], Any] = {}
        self._adding = threading.Lock()  # two threads may trace, and each commit must get its own number

    def deferred(self, gradients: Gradients, updates: Updates, learning_rate: tf.Tensor) -> None:
        """Average ``gradients``; each variable is updated when its average arrives. Does not wait for averages of this step."""
        bundles = self._exchange.bundles(gradients.keys())
        updates.prepare(bundles)
        self._updater.prepare(bundles)
        if tf.executing_eagerly():
            self._updater.synchronize()
            self._hand_over_eagerly(gradients, updates.numbers, learning_rate)
            self._commit_on_host(updates, bundles, learning_rate)
            return
        submitted = self._submit_in_graph(gradients, updates.numbers, learning_rate, all_at_once=False)
        key = updates, bundles
        with self._adding:
            if key not in self._commits:
                self._commits[key] = tf.function(self._make_commit(len(self._commits)), autograph=False)
        with tf.control_dependencies(submitted):
            self._commits[key](learning_rate)

    def averages(self, gradients: Gradients, numbers: Mapping[str, Any], learning_rate: tf.Tensor) -> dict[int, tf.Tensor]:
        """Average ``gradients``, wait for all averages and return them. Call :meth:`end` once the averages are used.

        Args:
            numbers: the optimizer's numbers, which must be equal on all ranks.

        Raises:
            UnsupportedError: some ranks have a gradient that others have not. From a graph, as TensorFlow's ``UnknownError``.
            RanksDiverged: the ranks' optimizers differ. From a graph, as TensorFlow's ``InvalidArgumentError``.
            CommschedError: the session failed. From a graph, as TensorFlow's ``InvalidArgumentError``.
        """
        indices = sorted(gradients)
        if tf.executing_eagerly():
            self._hand_over_eagerly(gradients, numbers, learning_rate)
            self._exchange.flags.wait()
            self._exchange.require_alike()
            for index in range(len(self._paths)):
                self._exchange.wait(index)
            return dict(zip(indices, map(tf.constant, self._copies(indices))))
        collect = tf.function(self._make_collect(indices, [gradients[index].dtype for index in indices]), autograph=False)
        with tf.control_dependencies(self._submit_in_graph(gradients, numbers, learning_rate, all_at_once=True)):
            averages = collect()
        return {index: tf.ensure_shape(average, gradients[index].shape) for index, average in zip(indices, averages)}

    def end(self, changed: Sequence[tf.Variable]) -> None:
        """End the step. All its updates must be made, or be in the graph so far; they are updates of the variables
        ``changed``."""
        if tf.executing_eagerly():
            self._end_on_host()
            return

        def end() -> None:
            for variable in changed:
                touch(variable.handle)
            on_host(self._end_on_host, [])

        tf.function(end, autograph=False)()

    def _end_on_host(self) -> None:
        self._agreement.check_all(self._exchange.step)
        self._exchange.end()

    def _backward_order(self, gradients: Gradients) -> list[int]:
        return [index for index in reversed(self._exchange.forward_order) if index in gradients]

    def _has_gradient(self, gradients: Gradients) -> list[bool]:
        return [index in gradients for index in range(len(self._paths))]

    def _copies(self, indices: Sequence[int]) -> list[Any]:
        """Copies of the averages of the variables ``indices``, exactly those of which this rank has gradients. Raises
        UnsupportedError if only some ranks have a gradient of a variable; the error names it."""
        for index, path in enumerate(self._paths):
            if 0 < self._exchange.share(index) < 1:
                raise UnsupportedError(
                    f"only some ranks have a gradient of '{path}', and this optimizer updates all variables at once; have "
                    "every rank use it in each step"
                )
        return [self._exchange.average(index).copy() for index in indices]

    # --- eagerly ---

    def _hand_over_eagerly(self, gradients: Gradients, numbers: Mapping[str, Any], learning_rate: tf.Tensor) -> None:
        self._exchange.begin(self._has_gradient(gradients), numbers, float(learning_rate))
        for index in self._backward_order(gradients):
            self._exchange.submit(index, gradients[index].numpy())

    # --- in graphs ---

    def _submit_in_graph(
        self, gradients: Gradients, numbers: Mapping[str, Any], learning_rate: tf.Tensor, all_at_once: bool
    ) -> list[tf.Tensor]:
        """Submit gradients in the graph. Operations that must run after all submissions must depend on the returned tensors."""
        with self._adding:
            self._numbers.append(numbers)
            number = len(self._numbers) - 1
        first = gradients[self._backward_order(gradients)[0]]
        with tf.control_dependencies([first]):  # not before the first gradient: a graph ends without a step if its input ends
            begun = self._begin(tf.constant(self._has_gradient(gradients)), tf.constant(number), learning_rate, all_at_once)
        known = {index for index, gradient in gradients.items() if gradient.shape.is_fully_defined()}
        with tf.control_dependencies([begun]):
            return [
                tf.function(self._make_hand_over(bundle), autograph=False)([gradients[index] for index in bundle])
                for bundle in reversed(self._exchange.bundles(known))
                if gradients.keys() >= set(bundle)
            ] + [begun]

    def _begin_in_graph(
        self, has_gradient: tf.Tensor, number: tf.Tensor, learning_rate: tf.Tensor, all_at_once: bool
    ) -> tf.Tensor:
        """Begin the step once all updates of the previous step are made."""
        updater = self._updater
        with tf.control_dependencies([updater.signals.wait(updater.arrived if all_at_once else updater.all_open)]):
            done = on_host(self._begin_on_host, [has_gradient, number, learning_rate, all_at_once])
        with tf.control_dependencies([done]):
            return tf.constant(True)

    def _begin_on_host(self, has_gradient: Any, number: Any, learning_rate: Any, all_at_once: Any) -> None:
        self._exchange.begin(has_gradient, self._numbers[int(number)], float(learning_rate))
        if all_at_once:
            self._updater.await_all()

    def _make_hand_over(self, bundle: Bundle) -> Any:
        def submit(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
            # This function reads a variable. Otherwise TensorFlow would order it after all other such operations.
            with tf.control_dependencies([self._updater.signals.closed.read_value()]):
                if len(bundle) == 1:
                    done = on_host(self._exchange.submit, gradients, first=bundle)
                else:
                    flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
                    done = on_host(self._exchange.hand_over_bundle, [flat], first=(bundle,))
            with tf.control_dependencies([done]):
                return tf.constant(True)

        return submit

    def _commit_on_host(self, updates: Updates, bundles: Sequence[Bundle], learning_rate: Any) -> None:
        # Counted here and not by a separate operation, which might or might not run in a graph that ends with an error.
        self._updater.commit(updates, bundles, tf.convert_to_tensor(learning_rate), self._iterations.read_value())
        self._iterations.assign_add(1)
        self._exchange.end()

    def _commit_numbered(self, number: int, learning_rate: Any) -> None:
        self._commit_on_host(*list(self._commits)[number], learning_rate)

    def _make_commit(self, number: int) -> Any:
        updater = self._updater

        def commit(learning_rate: tf.Tensor) -> None:
            for variable in [
                *(gate.variable for gate in updater.gates),
                *updater.state,
                updater.signals.closed,
                self._iterations,
            ]:
                touch(variable.handle)
            on_host(self._commit_numbered, [learning_rate], first=(number,))

        return commit

    def _make_collect(self, indices: Sequence[int], dtypes: Sequence[tf.DType]) -> Any:
        def collect() -> Any:
            with tf.control_dependencies([self._updater.signals.wait(self._updater.arrived)]):
                return on_host(self._copies, [], dtypes, first=(indices,))

        return collect


def on_host(
    method: Callable[..., Any], inputs: Sequence[Any], types: Sequence[tf.DType] = (), *, first: tuple[Any, ...] = ()
) -> Any:
    """Add an operation that calls ``method(*first, *inputs)`` with NumPy arrays, and returns its results, of ``types``.

    TensorFlow keeps an operation's Python function until the process ends. So the function refers only weakly to the object of
    ``method``, which holds the model. If the operation runs after the object is gone, it raises ClosedError, which TensorFlow
    raises as its ``UnknownError``.
    """
    known = WeakMethod(method)

    def call(*arrays: Any) -> Any:
        alive = known()
        if alive is None:
            raise ClosedError("the ScheduledOptimizer that this function was traced with no longer exists")
        return alive(*first, *arrays)

    return tf.numpy_function(call, list(inputs), list(types))
