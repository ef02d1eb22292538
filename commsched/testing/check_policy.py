"""check_policy: checks the rules that every scheduling policy must keep. Needs no test framework."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ..core.scheduler import Policy, Scheduler, is_key

_ROUNDS = 50


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """The attributes of a task that a policy may read. They cannot be changed."""

    nbytes: int
    priority: int


def check_policy(make_policy: Callable[[], Policy]) -> None:
    """Check a policy on random tasks, which are the same in each call.

    Args:
        make_policy: returns a new policy on each call.

    Raises:
        AssertionError: a rule is broken. Names the rule and the tasks.
    """
    rng = random.Random(0)
    for _ in range(_ROUNDS):
        tasks = [_Task(rng.randrange(1, 100), rng.randrange(20)) for _ in range(rng.randrange(1, 30))]
        _check_keys(make_policy(), tasks)
        _check_equal_tasks_keep_their_order(make_policy, rng)
        credit_bytes = rng.randrange(1, 200)
        order = _starts(make_policy, tasks, credit_bytes, random.Random(0))
        if order != _starts(make_policy, tasks, credit_bytes, random.Random(0)):
            raise AssertionError(f"two policies made alike start the same tasks in different orders: {tasks}")


def _check_keys(policy: Policy, tasks: list[_Task]) -> None:
    keys = [policy.key(task) for task in tasks]
    for task, key in zip(tasks, keys):
        if not is_key(key):
            raise AssertionError(f"the key {key!r} of {task} is not an int from 0 to 2^32 - 1")
        if policy.key(task) != key:
            raise AssertionError(f"the key of {task} changed from {key!r} to {policy.key(task)!r} while it waited")


def _check_equal_tasks_keep_their_order(make_policy: Callable[[], Policy], rng: random.Random) -> None:
    nbytes, priority = rng.randrange(1, 100), rng.randrange(20)
    tasks = [_Task(nbytes, priority) for _ in range(5)]
    scheduler: Scheduler[_Task] = Scheduler(make_policy(), credit_bytes=nbytes * len(tasks))
    for task in tasks:
        scheduler.add(task)
    if [scheduler.next() for _ in tasks] != tasks:
        raise AssertionError(f"tasks that differ in nothing but arrival ({tasks[0]}) do not start in order of arrival")


def _starts(make_policy: Callable[[], Policy], tasks: list[_Task], credit_bytes: int, rng: random.Random) -> list[int]:
    """Return the indices in ``tasks`` in order of start, while tasks arrive and are sent and new policies replace the old."""
    scheduler: Scheduler[_Task] = Scheduler(make_policy(), credit_bytes)
    to_come, in_flight, started = list(tasks), list[_Task](), list[_Task]()
    while to_come or in_flight or len(scheduler):
        if to_come and rng.random() < 0.5:
            scheduler.add(to_come.pop(0))
        if in_flight and rng.random() < 0.5:
            scheduler.sent(in_flight.pop(rng.randrange(len(in_flight))))
        if rng.random() < 0.1:
            scheduler.reconfigure(make_policy(), credit_bytes)
        while (task := scheduler.next()) is not None:
            in_flight.append(task)
            started.append(task)
            if len(in_flight) > 1 and sum(task.nbytes for task in in_flight) > credit_bytes:
                raise AssertionError(f"{in_flight} are in flight with a credit of {credit_bytes} bytes")
        if len(scheduler) and not in_flight:
            raise AssertionError(f"nothing is in flight, yet none of the {len(scheduler)} ready tasks starts")
    if Counter(map(id, started)) != Counter(map(id, tasks)):
        raise AssertionError(f"of {len(tasks)} tasks {len(set(map(id, started)))} were started, in {len(started)} starts")
    places = {id(task): place for place, task in enumerate(tasks)}
    return [places[id(task)] for task in started]
