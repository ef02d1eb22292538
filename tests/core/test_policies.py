import os
import resource

import pytest

from commsched.core.errors import ConfigError
from commsched.core.plan import Partition
from commsched.core.policies import make_policy, policy_names
from commsched.core.scheduler import Scheduler
from commsched.core.task import CommTask
from commsched.testing.check_policy import check_policy


def test_the_policies_there_are() -> None:
    assert {"fifo", "priority"} <= set(policy_names())


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_conforms(name: str) -> None:
    check_policy(lambda: make_policy(name))


@pytest.mark.parametrize(("name", "order"), [("fifo", [7, 2, 2, 0]), ("priority", [0, 2, 2, 7])])
def test_the_order_of_each(name: str, order: list[int]) -> None:
    scheduler: Scheduler[CommTask] = Scheduler(make_policy(name), 1000)
    for arrival, priority in enumerate((7, 2, 2, 0)):
        scheduler.add(CommTask(arrival, 0, Partition(priority, "uint8", 0, 1, (0,)), memoryview(b"x")))
    started = [task for task in iter(scheduler.next, None) if task is not None]
    assert [task.priority for task in started] == order
    assert [task.group for task in started if task.priority == 2] == [1, 2]  # equals as they came


def test_policies_are_there_when_no_more_files_can_be_opened() -> None:
    policy_names()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/", os.O_RDONLY)
        made = [type(make_policy(name)).__name__ for name in policy_names()]
        assert {"Fifo", "Priority"} <= set(made)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as raised:
        make_policy("lifo")
    assert str(raised.value) == f"policy 'lifo' is unknown; there are: {', '.join(policy_names())}"
