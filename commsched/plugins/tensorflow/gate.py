"""Gates: where readers of a variable wait while its update is outstanding.

A graph waits by an asynchronous kernel, that of a queue's ``dequeue``: who waits holds no thread of the executor, so that all
else goes on with a single thread too. What counts is a variable that says which gates are closed; an element in the queue only
wakes the graph up to look again. A graph that ends by an error between two operations can therefore leave an element behind, or
take one along, without any harm. (A queue as a lock would lose it; TensorFlow's ``MutexLock`` unlocks when somebody who waits
is cancelled.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import tensorflow as tf

from ...core.errors import UnsupportedError
from .on_host import on_host

#: Stateful operations that are no step of training, and contain none.
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"))


def touch(variable: tf.Variable) -> None:
    """An operation that TensorFlow, which knows what uses a variable, takes for an assignment: it runs after all that read the
    variable before, in the order of the program, and before all that read it later."""
    tf.raw_ops.VarIsInitializedOp(resource=variable.handle)


class Signals:
    """The state of ``count`` gates, and why no gate opens any more, as graphs see them."""

    def __init__(self, count: int) -> None:
        with tf.init_scope():
            self.closed = tf.Variable(tf.zeros(count, tf.bool), trainable=False, name="commsched_closed")
            self.awaiting = tf.Variable(False, trainable=False, name="commsched_awaiting")
            self._failure = tf.Variable("", trainable=False, name="commsched_failure")
            self._indices = [tf.constant(index) for index in range(count)]
            self._is_open = tf.constant(False)

    def close_all(self) -> None:
        self.closed.assign(tf.ones_like(self.closed))

    def open(self, index: int) -> None:
        tf.raw_ops.ResourceScatterUpdate(resource=self.closed.handle, indices=self._indices[index], updates=self._is_open)

    def fail(self, message: str) -> None:
        self._failure.assign(message)

    def failed(self) -> tf.Tensor:
        return tf.not_equal(self._failure.read_value(), "")

    def check(self) -> tf.Operation:
        """In a graph, an operation that raises ``InvalidArgumentError`` with the message, if there is one."""
        message = self._failure.read_value()
        return tf.raw_ops.Assert(condition=tf.equal(message, ""), data=[message])


class Wait:
    """Operations that wait while something is so.

    Args:
        settled: whose lock guards the state on the host.
        is_so: on the host.
        is_so_in_graph: adds operations that tell.
    """

    def __init__(
        self,
        settled: threading.Condition,
        signals: Signals,
        is_so: Callable[[], bool],
        is_so_in_graph: Callable[[], tf.Tensor],
    ) -> None:
        self._settled = settled
        self._signals = signals
        self._is_so = is_so
        self._is_so_in_graph = is_so_in_graph
        self._failed = False
        self._waiting = 0  # that were not woken
        self._queue: tf.queue.FIFOQueue | None = None

    def add(self) -> tf.Operation:
        """To the graph that is being traced; the operation that ends the wait, and raises if there is a failure."""
        if self._queue is None:
            with tf.init_scope():
                self._queue = tf.queue.FIFOQueue(1 << 30, [tf.bool], shapes=[()])
                self._element = tf.constant(True)
        queue = self._queue

        def wait(_: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.control_dependencies([on_host(self._ask, [])]):
                woken = queue.dequeue()
            with tf.control_dependencies([woken]):
                return (tf.logical_and(self._is_so_in_graph(), tf.logical_not(self._signals.failed())),)

        (last,) = tf.while_loop(lambda waits: waits, wait, [self._is_so_in_graph()])
        with tf.control_dependencies([last]):
            return self._signals.check()

    def _ask(self) -> None:
        with self._settled:
            self._waiting += 1
            self.look()

    def look(self) -> None:
        """Wake who waits, if it is so no longer. Called with ``settled`` locked."""
        if self._waiting and (self._failed or not self._is_so()):
            assert self._queue is not None
            for _ in range(self._waiting):
                tf.raw_ops.QueueEnqueueV2(handle=self._queue.queue_ref, components=[self._element])
            self._waiting = 0

    def fail(self) -> None:
        """Wake all; they find the failure. Called with ``settled`` locked, once ``signals`` has it."""
        self._failed = True
        self.look()


class Passage:
    """What a graph goes through before it reads ``variable``."""

    def __init__(self, variable: tf.Variable, waits: Callable[[], Sequence[Wait]]) -> None:
        self._variable = variable
        self._waits = waits
        self._pass = tf.function(self._operations, autograph=False)
        self._passed_at: WeakKeyDictionary[tf.Graph, int] = WeakKeyDictionary()  # by graph: its stateful operations then

    def add(self) -> None:
        """To the graph that is being traced, once for each piece of it that contains no step.

        Raises:
            UnsupportedError: it is a graph of another kind.
        """
        if not tf.inside_function():
            raise UnsupportedError(
                f"'{self._variable.name}' is read in a graph that is no tf.function, which cannot wait for its update: to "
                "export a model, call optimizer.detach() before"
            )
        graph = tf.compat.v1.get_default_graph()
        traced = _traced.setdefault(graph, _Traced())
        traced.look(graph)
        if self._passed_at.get(graph) != traced.stateful:
            self._passed_at[graph] = traced.stateful
            self._pass()
            traced.look(graph, ours=True)

    def _operations(self) -> None:
        with tf.control_dependencies([wait.add() for wait in self._waits()]):
            touch(self._variable)


class Gate:
    """Closed from ``close`` to ``open``, which are called with the lock of ``settled``.

    Args:
        variable: TensorFlow's, not Keras's.
        wait_eagerly: waits until the gate is open.
    """

    def __init__(
        self,
        index: int,
        variable: tf.Variable,
        signals: Signals,
        settled: threading.Condition,
        wait_eagerly: Callable[[], None],
    ) -> None:
        self.variable = variable
        self.is_closed = False
        self.wait = Wait(settled, signals, lambda: self.is_closed, lambda: tf.gather(signals.closed, index))
        self._index = index
        self._signals = signals
        self._wait_eagerly = wait_eagerly
        self._passage = Passage(variable, lambda: [self.wait])

    def settle(self) -> None:
        """Wait, or have the graph that is being traced wait."""
        if not tf.executing_eagerly():
            self._passage.add()
        elif self.is_closed:
            self._wait_eagerly()

    def open(self) -> None:
        self._signals.open(self._index)
        self.is_closed = False
        self.wait.look()


class _Traced:
    """What was traced so far of one graph, as far as passages need to know."""

    def __init__(self) -> None:
        self.operations = 0
        self.stateful = 0  # of those that may be, or contain, a step of training

    def look(self, graph: tf.Graph, ours: bool = False) -> None:
        """``ours``: what is new was added by a passage."""
        operations = graph.get_operations()
        if not ours:
            self.stateful += sum(
                operation.op_def.is_stateful and operation.type not in _READS for operation in operations[self.operations :]
            )
        self.operations = len(operations)


_traced: WeakKeyDictionary[tf.Graph, _Traced] = WeakKeyDictionary()
