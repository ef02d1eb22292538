"""Guarded variables, and the search for functions that were traced before."""

from __future__ import annotations

import gc

import keras
import pytest
import tensorflow as tf

from commsched.plugins.tensorflow import guard as earlier
from commsched.plugins.tensorflow.guard import guard, is_guarded, release, unguarded


@pytest.mark.parametrize("assigns", [False, True])
def test_a_variable_that_is_released_while_it_is_settled(assigns: bool) -> None:
    """By another thread, which closes the session."""
    variable = keras.Variable([1.0, 2.0])
    own = type(variable)
    guard(variable, lambda: release(variable), lambda: None)
    assert type(variable) is not own
    if assigns:
        variable.assign([3.0, 4.0])
    assert variable.value.numpy().tolist() == ([3.0, 4.0] if assigns else [1.0, 2.0])
    assert type(variable) is own
    assert not is_guarded(variable)


def test_who_assigns_is_noticed() -> None:
    """Eagerly, once it is done; not where a graph is traced, nor within an update."""
    variable = keras.Variable([1.0, 2.0])
    seen = []
    guard(variable, lambda: None, lambda: seen.append(float(variable[0])))
    variable.assign([3.0, 2.0])
    variable.assign_add([1.0, 0.0])
    tf.function(lambda: variable.assign([7.0, 2.0]))()
    with unguarded():
        variable.assign([8.0, 2.0])
    assert seen == [3.0, 4.0]
    release(variable)
    variable.assign([9.0, 2.0])
    assert seen == [3.0, 4.0]


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_during_the_search(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which crashed the process: objects of graphs make others when they are asked what they refer to."""
    traced = tf.function(lambda number: number * 2.0).get_concrete_function(tf.TensorSpec((), tf.float32))
    enabled: list[bool] = []
    monkeypatch.setattr(earlier, "unfreeze_objects", lambda: enabled.append(gc.isenabled()))
    thresholds = gc.get_threshold()
    try:
        if collects:
            gc.enable()
        gc.set_threshold(1)
        found = earlier._instances({type(traced)})
        assert gc.isenabled() == collects
    finally:
        gc.set_threshold(*thresholds)
        gc.disable()  # as conftest.py has it
    assert enabled == [False]
    assert any(each is traced for each in found)
