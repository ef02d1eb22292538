"""check_policy must refuse what no policy may do; that it accepts ours is in tests/core/test_policies.py."""

import itertools
import random
from typing import Any

import pytest

from commsched.core.scheduler import Schedulable
from commsched.testing.check_policy import check_policy


class Largest:
    """A policy of somebody else's that is all right."""

    def key(self, task: Schedulable) -> tuple[int, int]:
        return -task.nbytes, task.priority


class Unordered:
    def key(self, task: Schedulable) -> Any:
        return object()


class NotANumber:
    def key(self, task: Schedulable) -> float:
        return float("nan")


class Moody:
    def __init__(self) -> None:
        self.calls = itertools.count()

    def key(self, task: Schedulable) -> int:
        return next(self.calls)


class ByIdentity:
    """Stable while a task waits, yet equal tasks start in any order."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}

    def key(self, task: Schedulable) -> int:
        return self.keys.setdefault(id(task), -len(self.keys))


class Dice:
    def __init__(self) -> None:
        self.sign = random.choice((-1, 1))

    def key(self, task: Schedulable) -> int:
        return self.sign * task.priority


class Curious:
    def key(self, task: Any) -> int:
        return int(task.step)


class Meddler:
    def key(self, task: Any) -> int:
        task.nbytes = 0
        return 0


def test_any_total_order_by_size_and_priority_is_accepted() -> None:
    check_policy(Largest)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Unordered, "changed from .* while it waited"),
        (NotANumber, "changed from nan to nan while it waited"),
        (Moody, "the key of _Task.* changed from 0 to "),
        (ByIdentity, "do not start in order of arrival"),
        (Dice, "two policies made alike start the same tasks in different orders"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_policy(policy)


def test_keys_that_cannot_be_compared_are_refused() -> None:
    class Text:
        def key(self, task: Schedulable) -> Any:
            return "" if task.priority == 0 else task.priority

    with pytest.raises(AssertionError, match="cannot be compared: '<' not supported between instances of"):
        check_policy(Text)


def test_a_partial_order_is_refused() -> None:
    class Sets:
        def key(self, task: Schedulable) -> Any:
            return frozenset([task.priority])

    with pytest.raises(AssertionError, match="not exactly one of <, ==, > holds"):
        check_policy(Sets)


@pytest.mark.parametrize("policy", [Curious, Meddler])
def test_a_policy_knows_size_and_priority_and_changes_nothing(policy: Any) -> None:
    with pytest.raises(AttributeError):
        check_policy(policy)
