from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commsched.core.policies import make_policy
from commsched.core.scheduler import Policy, Scheduler


@dataclass(frozen=True, eq=False)
class Task:
    nbytes: int
    priority: int


def scheduler_of(*tasks: Task, policy: str = "priority", credit_bytes: int = 10) -> Scheduler[Task]:
    scheduler: Scheduler[Task] = Scheduler(make_policy(policy), credit_bytes)
    for task in tasks:
        scheduler.add(task)
    return scheduler


def start_all(scheduler: Scheduler[Task]) -> list[Task]:
    """All tasks in order of start; each is sent at once."""
    started = []
    while (task := scheduler.next()) is not None:
        scheduler.sent(task)
        started.append(task)
    return started


class SchedulerMachine(RuleBasedStateMachine):
    """Everything a scheduler may be asked, in any order, against a model that is a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy = make_policy("priority")
        self.credit_bytes = 100
        self.scheduler: Scheduler[Task] = Scheduler(self.policy, self.credit_bytes)
        self.ready: list[Task] = []  # in order of arrival
        self.in_flight: list[Task] = []

    @rule(nbytes=st.integers(1, 120), priority=st.integers(0, 8))
    def becomes_ready(self, nbytes: int, priority: int) -> None:
        task = Task(nbytes, priority)
        self.ready.append(task)
        self.scheduler.add(task)

    @rule()
    def start_one(self) -> None:
        task = self.scheduler.next()
        flying = sum(task.nbytes for task in self.in_flight)
        if not self.ready:
            assert task is None
            return
        best = min(self.ready, key=self.policy.key)  # min takes the first of equals: the one that arrived first
        if self.in_flight and flying + best.nbytes > self.credit_bytes:
            assert task is None, "nothing may overtake a best task that does not fit"
            return
        assert task is best
        self.ready.remove(task)  # fails if it was started before, or was never ready
        self.in_flight.append(task)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def bytes_left(self, data: st.DataObject) -> None:
        self.scheduler.sent(self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1))))

    @rule(policy=st.sampled_from(["priority", "fifo"]), credit_bytes=st.integers(1, 300))
    def reconfigure(self, policy: str, credit_bytes: int) -> None:
        self.policy, self.credit_bytes = make_policy(policy), credit_bytes
        self.scheduler.reconfigure(self.policy, credit_bytes)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.scheduler) == len(self.ready)
        assert self.scheduler.credit.in_flight == sum(task.nbytes for task in self.in_flight)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40)

tasks = st.builds(Task, st.integers(1, 50), st.integers(0, 5))


@given(st.lists(tasks, max_size=30), st.integers(1, 100), st.sampled_from(["priority", "fifo"]))
def test_each_task_starts_exactly_once(ready: list[Task], credit_bytes: int, policy: str) -> None:
    started = start_all(scheduler_of(*ready, policy=policy, credit_bytes=credit_bytes))
    assert sorted(map(id, started)) == sorted(map(id, ready))


@given(st.lists(tasks, max_size=30), st.lists(st.sampled_from(["priority", "fifo"]), min_size=1, max_size=4))
def test_reconfigure_keeps_the_order_of_arrival(ready: list[Task], policies: list[str]) -> None:
    scheduler = scheduler_of(*ready, policy="fifo")
    for policy in policies:
        scheduler.reconfigure(make_policy(policy), 10)
    started = start_all(scheduler)
    if policies[-1] == "fifo":
        assert started == ready
    else:
        assert started == sorted(ready, key=lambda task: task.priority)  # stable: equals keep their order


@given(st.lists(tasks, min_size=1, max_size=30), st.integers(1, 100))
def test_it_never_stalls_with_nothing_in_flight(ready: list[Task], credit_bytes: int) -> None:
    assert scheduler_of(*ready, credit_bytes=credit_bytes).next() is not None


def test_nothing_overtakes_a_head_that_does_not_fit() -> None:
    first, head, small = Task(6, 0), Task(6, 1), Task(1, 2)
    scheduler = scheduler_of(first, head, small, credit_bytes=10)
    assert scheduler.next() is first
    assert scheduler.next() is None  # small would fit, but is behind head
    scheduler.sent(first)
    assert [scheduler.next(), scheduler.next()] == [head, small]


def test_a_more_urgent_task_goes_first_at_the_next_start() -> None:
    late = [Task(4, 9) for _ in range(3)]
    scheduler = scheduler_of(*late, credit_bytes=4)
    assert scheduler.next() is late[0]
    scheduler.add(urgent := Task(4, 0))
    scheduler.sent(late[0])
    assert scheduler.next() is urgent


def test_a_smaller_credit_admits_nothing_until_enough_has_left() -> None:
    a, b, c = Task(5, 0), Task(5, 1), Task(5, 2)
    scheduler = scheduler_of(a, b, c, credit_bytes=10)
    assert [scheduler.next(), scheduler.next()] == [a, b]
    scheduler.reconfigure(make_policy("priority"), 6)
    scheduler.sent(a)
    assert scheduler.next() is None
    scheduler.sent(b)
    assert scheduler.next() is c


def test_tasks_that_cannot_be_compared_may_have_equal_priorities() -> None:
    equals = [Task(1, 3) for _ in range(5)]
    assert start_all(scheduler_of(*equals)) == equals


@given(st.lists(tasks, max_size=30))
def test_by_priority_what_starts_later_is_less_urgent(ready: list[Task]) -> None:
    started = start_all(scheduler_of(*ready))
    assert all(before.priority <= after.priority for before, after in pairwise(started))


def test_credit_of_a_task_that_was_not_started_cannot_come_back() -> None:
    with pytest.raises(AssertionError, match="6 bytes of credit came back, but only 0 are in flight"):
        scheduler_of().sent(Task(6, 0))


def test_repr_shows_what_is_ready_and_in_flight() -> None:
    scheduler = scheduler_of(Task(4, 0), Task(4, 1))
    scheduler.next()
    assert repr(scheduler) == "<Scheduler 1 ready, <CreditWindow 4/10 B>>"


def test_has_work_means_that_next_returns_a_task() -> None:
    scheduler = scheduler_of(Task(6, 0), Task(6, 1))
    assert scheduler.has_work()
    first = scheduler.next()
    assert first is not None
    assert not scheduler.has_work()  # the second does not fit the credit
    assert scheduler.next() is None
    scheduler.sent(first)
    assert scheduler.has_work()
