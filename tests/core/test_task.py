from itertools import product

import pytest

from commsched.core.plan import Partition
from commsched.core.task import TRANSITIONS, CommTask, State

EVENTS = ("notify_ready", "start", "notify_sent", "notify_finish")
LIFE = (State.PENDING, State.READY, State.STARTED, State.SENT, State.DONE)


def make_task(state: State = State.PENDING) -> CommTask:
    task = CommTask(0, 7, Partition(3, "float32", 8, 24, (1, 2)), memoryview(bytearray(16)))
    task.state = state
    return task


def test_a_whole_life() -> None:
    task = make_task()
    seen = [task.state]
    for event in EVENTS:
        task.advance(event)
        seen.append(task.state)
    assert tuple(seen) == LIFE


def test_the_life_of_a_task_on_a_device() -> None:
    task = make_task()
    for event, state in (("stage", State.STAGED), ("notify_ready", State.READY)):
        task.advance(event)
        assert task.state is state


def test_the_table_has_no_other_row() -> None:
    assert {event for _, event in TRANSITIONS} == {*EVENTS, "stage"}
    assert len(TRANSITIONS) == len(EVENTS) + 2  # two ways lead from PENDING to READY


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in product(State, (*EVENTS, "stage", "no such event")) if pair not in TRANSITIONS],
)
def test_every_other_transition_raises_and_changes_nothing(state: State, event: str) -> None:
    task = make_task(state)
    with pytest.raises(KeyError, match=event):
        task.advance(event)
    assert task.state is state


def test_a_task_takes_size_and_priority_from_its_partition() -> None:
    task = make_task()
    assert (task.nbytes, task.priority, task.missing) == (16, 3, 2)
    assert repr(task) == "<CommTask all_reduce step 7 partition 3 16 B pending>"
