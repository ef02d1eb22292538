"""Guarded variables."""

from __future__ import annotations

import keras
import pytest

from commsched.plugins.tensorflow.guard import guard, is_guarded, release


@pytest.mark.parametrize("assigns", [False, True])
def test_a_variable_that_is_released_while_it_is_settled(assigns: bool) -> None:
    """By another thread, which closes the session."""
    variable = keras.Variable([1.0, 2.0])
    own = type(variable)
    guard(variable, lambda: release(variable))
    assert type(variable) is not own
    if assigns:
        variable.assign([3.0, 4.0])
    assert variable.value.numpy().tolist() == ([3.0, 4.0] if assigns else [1.0, 2.0])
    assert type(variable) is own
    assert not is_guarded(variable)
