"""Gates: where readers of a variable wait while its update is outstanding.

A graph waits by an asynchronous kernel, that of a queue's ``dequeue``: who waits holds no thread of the executor, so that all
else goes on with a single thread too, and no Python. What counts is a variable that says which gates are closed; an element in
the queue only wakes the graph up to look again. A graph that ends by an error between two operations can therefore leave an
element behind, or take one along, without any harm. (A queue as a lock would lose it; TensorFlow's ``MutexLock`` unlocks when
somebody who waits is cancelled.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from ...core.errors import UnsupportedError
from .compiled import Compiled

#: Stateful operations that are no step of training, and contain none.
_READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"))

_RESOURCE = tf.TensorSpec((), tf.resource)
#: Which gates are closed, which one is meant, how many wait at it and what they wait by, and why no gate opens any more.
_GATE = (_RESOURCE, tf.TensorSpec((), tf.int32), _RESOURCE, _RESOURCE, _RESOURCE)


_waking = threading.Lock()  # held while those who wait are told of a failure


def touch(resource: tf.Tensor) -> None:
    """An operation that TensorFlow, which knows what uses a variable, takes for an assignment: it runs after all that read the
    variable before, in the order of the program, and before all that read it later."""
    tf.raw_ops.VarIsInitializedOp(resource=resource)


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
        """What operations need to know of it, as ``_GATE`` says."""
        return [
            self.closed.handle,
            self._indices[index],
            self._waiting[index].handle,
            self._queues[index].queue_ref,
            self._failure.handle,
        ]

    def wait(self, index: int) -> tf.Tensor:
        """Add to the graph that is being traced what waits until the gate is open. What is to run after it must depend on what
        is returned; where it waits and there is a failure, it raises that as ``InvalidArgumentError``."""
        return _wait(*self.gate(index))

    def close(self, gates: Sequence[int]) -> None:
        tf.raw_ops.ResourceScatterUpdate(
            resource=self.closed.handle, indices=tf.constant(gates, tf.int32), updates=tf.constant(True)
        )

    def prepare(self, gates: tuple[int, ...]) -> None:
        """For ``open``, which else compiles what it runs."""
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
        """Wake all; they find the failure. So does who is to wait from now on."""
        with _waking:
            self._failure.assign(message)
            for index in range(len(self._indices)):
                self._wake(index)

    def _wake(self, index: int) -> None:
        """An element for each that has said it would wait, so that whoever does finds one."""
        waiting = self._waiting[index]
        count = tf.maximum(waiting.read_value(), 0)  # below: there are elements for those who come
        waiting.assign_sub(count)
        tf.raw_ops.QueueEnqueueManyV2(handle=self._queues[index].queue_ref, components=[tf.fill([count], True)])


# The functions below hold nothing of an optimizer: TensorFlow traces them once, and keeps them.


def _wait(closed: tf.Tensor, index: tf.Tensor, *rest: tf.Tensor) -> tf.Tensor:
    """A call, and not what it consists of: a branch that is not taken costs what its operations are."""
    return tf.cond(_is_closed(closed, index), lambda: _until_open(closed, index, *rest), lambda: tf.constant(True))


@tf.function(input_signature=_GATE, autograph=False, experimental_attributes={"_noinline": True})  # type: ignore[untyped-decorator]
def _until_open(closed: tf.Tensor, index: tf.Tensor, waiting: tf.Tensor, queue: tf.Tensor, failure: tf.Tensor) -> tf.Tensor:
    def wait(_: tf.Tensor) -> tuple[tf.Tensor]:
        # Who says first that it waits and looks then is not missed by who opens first and counts then.
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
    """Whoever has opened meanwhile may have put an element there already: the next who waits takes it, and so counts as none.
    Not to take it back would leave ever more of them, each of which wakes for nothing at each wait."""
    with tf.control_dependencies([tf.raw_ops.AssignSubVariableOp(resource=waiting, value=tf.constant(1))]):
        return tf.constant(True)


def _all_are_woken() -> bool:
    """Who raised before would have TensorFlow cancel the others' ``dequeue``, and might see that error instead of its own."""
    with _waking:
        return True


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
    """What a graph goes through before it reads ``variable``: the gate of ``signals`` with this ``index``."""

    def __init__(self, variable: tf.Variable, signals: Signals, index: int) -> None:
        self._variable = variable
        self._gate = signals.gate(index)
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
            _pass(*self._gate, self._variable.handle)
            traced.look(graph, ours=True)


class Gate:
    """That of ``variable``, TensorFlow's and not Keras's, as this process's threads see it. ``wait_eagerly`` waits until it is
    open."""

    def __init__(self, index: int, variable: tf.Variable, signals: Signals, wait_eagerly: Callable[[], None]) -> None:
        self.variable = variable
        self.is_closed = False
        self._wait_eagerly = wait_eagerly
        self._passage = Passage(variable, signals, index)

    def settle(self) -> None:
        """Wait, or have the graph that is being traced wait."""
        if not tf.executing_eagerly():
            self._passage.add()
        elif self.is_closed:
            self._wait_eagerly()


class _Traced:
    """What was traced so far of one graph, as far as passages need to know."""

    def __init__(self) -> None:
        self.operations = 0
        self.stateful = 0  # of those that may be, or contain, a step of training

    def look(self, graph: Any, ours: bool = False) -> None:
        """``ours``: what is new was added by a passage."""
        operations = graph.get_operations()
        if not ours:
            self.stateful += sum(
                operation.op_def.is_stateful and operation.type not in _READS for operation in operations[self.operations :]
            )
        self.operations = len(operations)


_traced: WeakKeyDictionary[tf.Graph, _Traced] = WeakKeyDictionary()
