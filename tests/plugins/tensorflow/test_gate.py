"""Gates as graphs see them, and what tells them to open."""

from __future__ import annotations

import time
from typing import Any

import keras
import pytest
import tensorflow as tf

from commsched import ClosedError, Session
from commsched.plugins.tensorflow import ScheduledOptimizer
from commsched.plugins.tensorflow.gate import Signals, _until_open

from .training import mlp, on_ranks


def elements(signals: Signals) -> int:
    return int(tf.raw_ops.QueueSizeV2(handle=signals.gate(0)[3]))


def test_who_finds_the_gate_open_at_the_second_look_leaves_nothing_behind() -> None:
    """Each element that is left would wake each of those who wait from then on once for nothing, and be left again."""
    signals = Signals(1)
    for _ in range(3):
        _until_open(*signals.gate(0))
    signals.open((0,))
    assert elements(signals) == 0


def test_an_element_that_nobody_took_wakes_once_and_no_gate_stays_locked() -> None:
    """Who said that it would wait was counted by who opened, and did not wait."""
    signals = Signals(1)
    gate = signals.gate(0)
    tf.raw_ops.AssignAddVariableOp(resource=gate[2], value=tf.constant(1))
    signals.open((0,))  # between what the other says and its second look
    tf.raw_ops.AssignSubVariableOp(resource=gate[2], value=tf.constant(1))
    assert elements(signals) == 1
    signals.open((0,))  # nobody waits: none is added, and that one still counts
    assert elements(signals) == 1

    def body(session: Session) -> None:
        if session.rank == 0:
            signals.close([0])
            session.gather("closed")
            while elements(signals) or not int(_waiting(gate)):
                time.sleep(0.001)
            signals.open((0,))
        else:
            session.gather("closed")
            _until_open(*gate)

    on_ranks(body)
    assert elements(signals) == 0


def _waiting(gate: Any) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=gate[2], dtype=tf.int32)


def test_no_step_closes_gates_that_nobody_opens() -> None:
    """One that another thread had begun when the optimizer was detached."""

    def body(session: Session) -> None:
        model = mlp()
        optimizer = ScheduledOptimizer(keras.optimizers.SGD(0.1), model, session=session)
        optimizer.apply([tf.ones_like(variable) for variable in model.trainable_variables])
        updater = optimizer._schedule._updater
        optimizer.detach()
        with pytest.raises(ClosedError):
            updater.commit(None, (), tf.constant(0.1), tf.constant(1))
        with pytest.raises(ClosedError):
            updater.await_all()
        assert not tf.reduce_any(updater.signals.closed)

    on_ranks(body)
