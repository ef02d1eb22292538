"""Gates: where readers of a variable wait while its update is outstanding.

A graph waits in an asynchronous kernel, a queue's ``dequeue``. The wait holds no thread of the executor, so everything else
goes on even with a single thread. It runs no Python either. A variable says which gates are closed, and only this variable
counts. An element in the queue merely wakes the graph to look again. A graph that ends with an error between two operations can
therefore leave an element behind, or take one along, without harm. (If the queue were the lock, the lock would be lost then.
TensorFlow's ``MutexLock`` unlocks when a waiter is cancelled.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from ...core.errors import UnsupportedError

#: Stateful operations that are not a training step and do not contain one.
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"))

_RESOURCE = tf.TensorSpec((), tf.resource)
#: The signature of a gate's handles: which gates are closed, the gate's index, the number of its waiters, the queue in which
#: they wait, and the failure after which no gate opens any more.
_GATE = (_RESOURCE, tf.TensorSpec((), tf.int32), _RESOURCE, _RESOURCE, _RESOURCE)


_waking = threading.Lock()  # held while waiters are notified of a failure


def touch(resource: tf.Tensor) -> None:
    """Add an operation that TensorFlow treats as an assignment to the variable. In the order of the program, it runs after all
    operations that read the variable before it, and before all operations that read the variable after it."""
    tf.raw_ops.VarIsInitializedOp(resource=resource)


class Compiled:
    """``function``, traced. It takes tensors of ``signature`` and returns nothing.

    An eager call does the same as a call of a ``tf.function``, in a fifth of the time. The time is spent in Python.
    """

    def __init__(self, function: Callable[..., None], *signature: tf.TensorSpec) -> None:
        with tf.init_scope():
            self._function = tf.function(function, autograph=False).get_concrete_function(*signature)
        self._captures = list(self._function.captured_inputs)

    def __call__(self, *args: Any) -> None:
        tf.raw_ops.StatefulPartitionedCall(args=[*args, *self._captures], Tout=[], f=self._function)


class Signals:
    """``count`` gates as graphs see them, all open. Any thread may close, open and fail them."""

    def __init__(self, count: int) -> None:
        with tf.init_scope():
            self.closed = tf.Variable(tf.zeros(count, tf.bool), trainable=False, name="commsched_closed")
            self._failure = tf.Variable("", trainable=False, name="commsched_failure")
            self._waiting = [tf.Variable(0, trainable=False, name="commsched_waiting") for _ in range(count)]
            self._queues = [tf.queue.FIFOQueue(1 << 30, [tf.bool], shapes=[()]) for _ in range(count)]
            self._indices = [tf.constant(index) for index in range(count)]
        self._openings: dict[tuple[int, ...], Compiled] = {}

    def gate(self, index: int) -> list[tf.Tensor]:
        """Handles that graph operations need to wait on this gate (see ``_GATE``)."""
        return [
            self.closed.handle,
            self._indices[index],
            self._waiting[index].handle,
            self._queues[index].queue_ref,
            self._failure.handle,
        ]

    def wait(self, index: int) -> tf.Tensor:
        """Add a wait for the gate to the graph that is being traced. Operations that must run after it must depend on the
        returned tensor. If the gate is closed and there is a failure, the wait raises it as ``InvalidArgumentError``."""
        return _wait(*self.gate(index))

    def close(self, gates: Sequence[int]) -> None:
        tf.raw_ops.ResourceScatterUpdate(
            resource=self.closed.handle, indices=tf.constant(gates, tf.int32), updates=tf.constant(True)
        )

    def prepare(self, gates: tuple[int, ...]) -> None:
        """Compile the function that ``open`` runs, which otherwise compiles it at its first call."""
        if gates not in self._openings:

            def opening() -> None:
                opened = tf.raw_ops.ResourceScatterUpdate(
                    resource=self.closed.handle, indices=tf.constant(gates, tf.int32), updates=tf.constant(False)
                )
                with tf.control_dependencies([opened]):
                    for index in gates:
                        self._wake(index)

            self._openings[gates] = Compiled(opening)

    def open(self, gates: tuple[int, ...]) -> None:
        self.prepare(gates)
        self._openings[gates]()

    def fail(self, message: str) -> None:
        """Wake all waiters with the failure ``message``. A later wait at a closed gate raises it too."""
        with _waking:
            self._failure.assign(message)
            for index in range(len(self._indices)):
                self._wake(index)

    def _wake(self, index: int) -> None:
        """Add one element for each announced waiter, so that each finds one."""
        waiting = self._waiting[index]
        count = tf.maximum(waiting.read_value(), 0)  # negative: the queue already has elements for the next waiters
        waiting.assign_sub(count)
        tf.raw_ops.QueueEnqueueManyV2(handle=self._queues[index].queue_ref, components=[tf.fill([count], True)])


# The functions below hold no object of an optimizer, because TensorFlow traces them once and keeps them.


def _wait(closed: tf.Tensor, index: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
    """Wait until the gate is open. The branch is one call of a function: operations cost time even in a branch not taken."""
    return tf.cond(_is_closed(closed, index), lambda: _until_open(closed, index, *rest), lambda: tf.constant(True))


@tf.function(input_signature=_GATE, autograph=False, experimental_attributes={"_noinline": True})  # type: ignore[untyped-decorator]
def _until_open(closed: tf.Tensor, index: tf.Tensor, waiting: tf.Tensor, queue: tf.Tensor, failure: tf.Tensor) -> tf.Tensor:
    def wait(_: tf.Tensor) -> tuple[tf.Tensor]:
        # A waiter announces itself first and then looks. An opener opens first and then counts waiters. So none is missed.
        said = tf.raw_ops.AssignAddVariableOp(resource=waiting, value=tf.constant(1))
        with tf.control_dependencies([said]):
            waits = tf.logical_and(_is_closed(closed, index), tf.equal(_read_failure(failure), ""))
        woken = tf.cond(
            waits,
            lambda: tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.bool])[0],
            lambda: _does_not_wait(waiting),
        )
        with tf.control_dependencies([woken]):
            message = _read_failure(failure)
            told = tf.cond(
                tf.equal(message, ""),
                lambda: tf.constant(True),
                lambda: tf.numpy_function(_all_are_woken, [], tf.bool),
            )
        with tf.control_dependencies([told]):
            message = tf.identity(message)
        with tf.control_dependencies([tf.raw_ops.Assert(condition=tf.equal(message, ""), data=[message])]):
            return (_is_closed(closed, index),)

    (still_closed,) = tf.while_loop(lambda waits: waits, wait, [tf.constant(True)])
    return still_closed


def _does_not_wait(waiting: tf.Tensor) -> tf.Tensor:
    """Take back the announcement of a waiter that need not wait.

    An opener may have added an element for it already. The next waiter takes that element, and then needs none of its own.
    Without this, ever more elements would stay in the queue, each of which wakes a later waiter for nothing.
    """
    with tf.control_dependencies([tf.raw_ops.AssignSubVariableOp(resource=waiting, value=tf.constant(1))]):
        return tf.constant(True)


def _all_are_woken() -> bool:
    """Wait until all waiters of a failure are woken.

    If one raised before that, TensorFlow would cancel the others' ``dequeue``, and the error of that might be seen instead.
    """
    with _waking:
        return True


def refuse_xla(graph: Any, what: str) -> None:
    """Refuse a graph that XLA compiles. ``what`` says in the error what happens in the graph. Raises UnsupportedError if XLA
    compiles the function of ``graph``, or a function around it."""
    while graph is not None:
        context = graph._get_control_flow_context()  # there is no public API for this
        while context is not None:
            if context.IsXLAContext():
                raise UnsupportedError(
                    f"{what} in a function that XLA compiles, where commsched can neither wait for averages nor send "
                    "gradients: remove jit_compile=True, and write model.compile(..., jit_compile=False)"
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)


def _is_closed(closed: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.raw_ops.ResourceGather(resource=closed, indices=index, dtype=tf.bool), [])


def _read_failure(failure: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=failure, dtype=tf.string), [])


@tf.function(input_signature=(*_GATE, _RESOURCE), autograph=False)  # type: ignore[untyped-decorator]
def _pass(
    closed: tf.Tensor, index: tf.Tensor, waiting: tf.Tensor, queue: tf.Tensor, failure: tf.Tensor, variable: tf.Tensor
) -> None:
    with tf.control_dependencies([_wait(closed, index, waiting, queue, failure)]):
        touch(variable)


class Passage:
    """The wait of graphs before they read ``variable``, at the gate of ``signals`` with this ``index``."""

    def __init__(self, variable: tf.Variable, signals: Signals, index: int) -> None:
        self._variable = variable
        self._gate = signals.gate(index)
        self._passed_at: WeakKeyDictionary[tf.Graph, int] = WeakKeyDictionary()  # by graph: _Traced.stateful at the last wait

    def add(self) -> None:
        """Add the wait to the graph that is being traced, once for each stretch of it that contains no training step. Raises
        UnsupportedError if the graph is not a ``tf.function``'s, or XLA compiles it."""
        if not tf.inside_function():
            raise UnsupportedError(
                f"'{self._variable.name}' is read in a graph that is not a tf.function, which cannot wait for its update: to "
                "export a model, call optimizer.detach() before"
            )
        graph = tf.compat.v1.get_default_graph()
        refuse_xla(graph, f"'{self._variable.name}' is read")
        traced = _traced.setdefault(graph, _Traced())
        traced.look(graph)
        if self._passed_at.get(graph) != traced.stateful:
            self._passed_at[graph] = traced.stateful
            _pass(*self._gate, self._variable.handle)
            traced.look(graph, ours=True)


class Gate:
    """The gate of ``variable`` (TensorFlow's, not Keras's) as this process's threads see it. ``wait_eagerly`` waits until the
    gate is open."""

    def __init__(self, index: int, variable: tf.Variable, signals: Signals, wait_eagerly: Callable[[], None]) -> None:
        self.variable = variable
        self.is_closed = False
        self._wait_eagerly = wait_eagerly
        self._passage = Passage(variable, signals, index)

    def settle(self) -> None:
        """Wait until the gate is open, or add the wait to the graph that is being traced."""
        if not tf.executing_eagerly():
            self._passage.add()
        elif self.is_closed:
            self._wait_eagerly()


class _Traced:
    """Counts the operations of one graph that were traced so far, for passages."""

    def __init__(self) -> None:
        self.operations = 0
        self.stateful = 0  # the number of operations that may be, or contain, a training step

    def look(self, graph: Any, ours: bool = False) -> None:
        """Count the new operations. ``ours``: a passage has added them."""
        operations = graph.get_operations()
        if not ours:
            self.stateful += sum(
                operation.op_def.is_stateful and operation.type not in _READS for operation in operations[self.operations :]
            )
        self.operations = len(operations)


_traced: WeakKeyDictionary[tf.Graph, _Traced] = WeakKeyDictionary()
