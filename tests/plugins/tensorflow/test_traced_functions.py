"""The search for functions that were traced before."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf

from commsched.plugins.tensorflow import traced_functions as earlier


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
