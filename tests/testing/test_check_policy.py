"""check_policy must refuse what no policy may do; that it accepts ours is in tests/core/test_policies.py."""

import itertools
import random
from typing import Any

import pytest

from commsched.core.scheduler import Schedulable
from commsched.testing.check_policy import check_policy


class Largest:
    """A policy of somebody else's that is all right."""

    def key(self, task: Schedulable) -> int:
        return 2**32 - 1 - task.nbytes


class Unordered:
    def key(self, task: Schedulable) -> Any:
        return object()


class NotANumber:
    def key(self, task: Schedulable) -> float:
        return float("nan")


class Pairs:
    def key(self, task: Schedulable) -> Any:
        return task.nbytes, task.priority


class Negative:
    def key(self, task: Schedulable) -> int:
        return -task.nbytes


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
        return self.keys.setdefault(id(task), 1_000_000 - len(self.keys))


class Dice:
    def __init__(self) -> None:
        self.turned = random.choice((False, True))

    def key(self, task: Schedulable) -> int:
        return 100 - task.priority if self.turned else task.priority


class Curious:
    def key(self, task: Any) -> int:
        return int(task.step)


class Meddler:
    def key(self, task: Any) -> int:
        task.nbytes = 0
        return 0


def test_any_order_by_size_and_priority_is_accepted() -> None:
    check_policy(Largest)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Unordered, "the key <object .*> of _Task.* is not an int from 0 to"),
        (NotANumber, "the key nan of _Task.* is not an int from 0 to"),
        (Pairs, r"the key \(\d+, \d+\) of _Task.* is not an int from 0 to"),
        (Negative, r"the key -\d+ of _Task.* is not an int from 0 to 2\^32 - 1"),
        (Moody, "the key of _Task.* changed from 0 to "),
        (ByIdentity, "do not start in order of arrival"),
        (Dice, "two policies made alike start the same tasks in different orders"),
    ],
)
def test_what_is_no_policy_is_refused(policy: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_policy(policy)


@pytest.mark.parametrize("policy", [Curious, Meddler])
def test_a_policy_knows_size_and_priority_and_changes_nothing(policy: Any) -> None:
    with pytest.raises(AttributeError):
        check_policy(policy)
