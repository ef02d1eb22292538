from collections import defaultdict
from typing import Any

import torch

from commsched.plugins.torch.update import _StateOfTwins


def test_the_state_of_a_twin_is_that_of_its_parameter() -> None:
    """An optimizer, or a hook of its step, may also replace the state of a parameter, or delete it."""
    parameter, twin, other = (torch.zeros(1) for _ in range(3))
    state: dict[Any, Any] = defaultdict(dict)
    seen = _StateOfTwins(state, {id(twin): parameter})
    seen[twin]["step"] = 1
    seen[other]["step"] = 5
    assert state == {parameter: {"step": 1}, other: {"step": 5}}
    seen[twin] = {"step": 2}
    assert state[parameter] == seen[twin] == {"step": 2}
    assert twin in seen
    assert len(seen) == 2
    del seen[twin]
    assert list(state) == [other]
    assert twin not in seen
    assert seen[twin] == {}  # made anew, as the optimizer's own state does
    seen[twin]["step"] = 3
    del seen[parameter]
    assert seen[twin] == {}
