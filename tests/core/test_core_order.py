"""Core on transports that need an order, and averages in two tasks."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from commsched.core.core import Core
from commsched.core.errors import ClosedError, CommschedError, ConfigError, OrderMismatch, UnsupportedError
from commsched.core.group import TensorGroup
from commsched.core.interfaces import ORDER, STALL
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import ALL_GATHER, REDUCE_SCATTER
from tests.recording_transport import RecordingTransport

MANIFEST = Manifest(tuple(TensorSpec(f"layer{index}", (10,), "uint8") for index in range(3)))
WHOLE = SchedulerConfig(partition_bytes=10, credit_bytes=1000)
SPLIT = SchedulerConfig(partition_bytes=10, credit_bytes=10, collective="rsag")


class Sent:
    """A Messenger that keeps what is sent, and can be waited for."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []
        self._changed = threading.Condition()

    def _put(self, kind: str, value: Any) -> None:
        with self._changed:
            self.messages.append((kind, value))
            self._changed.notify_all()

    def send_to_rank_0(self, topic: str, value: Any) -> None:
        self._put(f"tell {topic}", value)

    def announce(self, topic: str, value: Any, to: Sequence[int] = ()) -> None:
        self._put(f"announce {topic}", value)

    def propose(self, config: dict[str, Any]) -> None:
        self._put("propose", config)

    def wait(self, count: int) -> list[tuple[str, Any]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.messages) >= count, 60), self.messages
            return list(self.messages)


class Rank:
    def __init__(self, rank: int, config: SchedulerConfig = WHOLE, ordered: bool = True) -> None:
        self.transport = RecordingTransport(rank, 2, ordered=ordered)
        self.sent = Sent()
        self.failures: list[CommschedError] = []
        self.core = Core(self.transport, config, messenger=self.sent, on_failure=self._failed)
        plan = cut(MANIFEST, config.partition_bytes)
        self.group: TensorGroup = self.core.add_group(plan, {"uint8": memoryview(bytearray(30))})
        self.group.begin_step()

    def _failed(self, error: CommschedError) -> None:
        self.failures.append(error)
        self.core.fail(error)


@pytest.fixture
def leader() -> Iterator[Rank]:
    rank = Rank(0)
    yield rank
    rank.core.close()


@pytest.fixture
def follower() -> Iterator[Rank]:
    rank = Rank(1)
    yield rank
    rank.core.close()


def test_a_follower_tells_what_is_ready_and_starts_what_is_announced(follower: Rank) -> None:
    follower.group.notify_ready(2)
    ((kind, message),) = follower.sent.wait(1)
    assert (kind, message["ready"], message["launched"]) == ("tell order", [(0, 0, 0, [2])], 0)
    assert follower.transport.started == []
    launch = {"kind": "Launch", "channel": 0, "first": 0, "launch": message["ready"], "digest": digest_of(2)}
    follower.core.on_announced(ORDER, launch)
    (task,) = follower.transport.wait_started(1)
    assert (task.partition.index, task.channel, task.sequence) == (2, 0, 0)


def digest_of(partition: int) -> str:
    """As rank 0 makes it."""
    leader = Rank(0)
    try:
        leader.group.notify_ready(partition)
        leader.core.on_message(1, ORDER, ready(partition))
        ((_, message),) = leader.sent.wait(1)
        digest: str = message["digest"]
        return digest
    finally:
        leader.core.close()


def ready(partition: int) -> dict[str, Any]:
    return {"kind": "TasksReady", "ready": [[0, 0, 0, [partition]]], "freezes": 0, "launched": 0, "digest": ""}


def test_rank_0_announces_before_it_starts_what_all_have_ready(leader: Rank) -> None:
    leader.group.notify_ready(1)
    leader.core.on_message(1, ORDER, ready(1))
    (task,) = leader.transport.wait_started(1)
    assert task.partition.index == 1
    assert [kind for kind, _ in leader.sent.messages] == ["announce order"]


def test_a_mismatch_is_a_failure_of_the_core(leader: Rank) -> None:
    leader.group.notify_ready(1)
    leader.core.on_message(1, ORDER, {**ready(1), "launched": 1})
    with pytest.raises(OrderMismatch, match=r"rank 1 has launched 1 times, where rank 0 has decided on 0 launches"):
        leader.group.proxies[1].wait()
    assert len(leader.failures) == 1
    assert leader.transport.started == []


def test_a_mismatch_that_a_launch_shows_is_that_failure_too(leader: Rank) -> None:
    """The last launch of a static step is compared with the digests that other ranks have sent before."""
    mismatch = OrderMismatch("ranks 1 and 0 launched different tasks")

    def compare() -> Any:
        raise mismatch

    leader.core._order.next = compare  # type: ignore[method-assign]
    leader.group.notify_ready(0)
    leader.core.on_message(1, ORDER, ready(0))
    with pytest.raises(OrderMismatch, match="launched different tasks"):
        leader.group.proxies[0].wait()
    assert leader.failures == [mismatch]


def first_step(rank: Rank) -> None:
    for tensor in range(3):
        rank.group.notify_ready(tensor)
    for task in rank.transport.wait_started(3):
        rank.transport.done(task)


def test_a_rank_that_has_gone_on_to_the_next_step_is_late_with_nothing_of_the_last() -> None:
    rank = Rank(1, ordered=False)
    try:
        first_step(rank)
        rank.group.begin_step()
        for step in (0, 1):
            rank.core.on_announced(STALL, {"place": [0, step, 1], "number": step})
        answers = [message["answer"] for _, message in rank.sent.wait(2)]
        assert [(answer["missing"], answer["others"]) for answer in answers] == [(0, ()), (1, ["layer0", "layer2"])]
    finally:
        rank.core.close()


def test_a_wait_as_long_as_stall_after_ends_the_job_though_no_warning_is_due() -> None:
    failures: SimpleQueue[CommschedError] = SimpleQueue()
    core = Core(
        RecordingTransport(0, 1),
        WHOLE,
        messenger=Sent(),
        on_failure=failures.put,
        warn_after_seconds=1e6,
        stall_after_seconds=0.01,
    )
    group = core.add_group(cut(MANIFEST, 10), {"uint8": memoryview(bytearray(30))})
    group.begin_step()

    def wait() -> None:
        with suppress(ClosedError):
            group.proxies[0].wait()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    try:
        error = failures.get(timeout=60)
        said = r"rank 0 has not sent 'layer0'; rank 0 has waited \d s for the average of 'layer0' of step 0"
        assert re.match(said, str(error)), error
    finally:
        core.close()
        waiting.join(60)


def test_a_farewell_is_sent_when_it_returns(follower: Rank) -> None:
    follower.core.prepare_leave()
    assert follower.sent.messages == [("tell order", {"kind": "Leaves", "rank": 1, "steps": [(0, 0, 0)]})]
    assert follower.transport.left == [1]  # itself


def test_a_farewell_names_the_last_step_of_groups_that_were_released(follower: Rank) -> None:
    """Another rank may wait for a step of such a group in a static order. Groups of one step have no such order."""
    plan = cut(Manifest((TensorSpec("nothing", (0,), "uint8"),)), 10)
    for steps in (3, 2, 1):
        group = follower.core.add_group(plan, {"uint8": memoryview(bytearray())})
        for _ in range(steps):
            group.begin_step()
        group.release()
    assert follower.core.group_count == 4
    assert follower.core.pace(1, 5) is None  # it is forgotten, and group 2 takes its place in the summary
    assert follower.core.pace(2, 5) is not None
    follower.core.prepare_leave()
    ((_, message),) = follower.sent.messages
    assert sorted(message["steps"]) == [(0, 0, 0), (1, 3, 0), (2, 2, 0)]


def test_of_a_group_that_was_released_no_rank_is_late() -> None:
    rank = Rank(1, ordered=False)
    try:
        first_step(rank)
        rank.group.release()
        rank.group.release()  # nothing more
        for step in range(2):
            rank.core.on_announced(STALL, {"place": [0, step, 1], "number": step})
        answers = [message["answer"] for _, message in rank.sent.wait(2)]
        assert [(answer["begun"], answer["missing"]) for answer in answers] == [(True, 0), (False, 0)]
    finally:
        rank.core.close()


def test_a_farewell_after_close_is_an_error(follower: Rank) -> None:
    follower.core.close()
    with pytest.raises(ClosedError):
        follower.core.prepare_leave()


def test_who_leaves_is_told_to_the_transport_too(leader: Rank) -> None:
    leader.group.notify_ready(0)
    leader.core.leave(1)
    with pytest.raises(Exception, match=r"rank 1 left; tensor 'layer0' \(partition 0 of step 0, all_reduce\) waits for it"):
        leader.group.proxies[0].wait()
    assert leader.transport.left == [1]


def test_an_ordered_transport_needs_a_messenger() -> None:
    with pytest.raises(ValueError, match="an ordered transport needs a messenger"):
        Core(RecordingTransport(ordered=True), WHOLE)


# --- reduce-scatter and all-gather ---


def test_an_average_in_two_tasks_opens_its_proxy_after_the_second() -> None:
    rank = Rank(0, SPLIT, ordered=False)
    try:
        rank.group.notify_ready(2)
        (late,) = rank.transport.wait_started(1)
        rank.group.notify_ready(0)
        assert (late.partition.index, late.verb) == (2, REDUCE_SCATTER)
        rank.transport.done(late)
        (_, front) = rank.transport.wait_started(2)
        assert (front.partition.index, front.verb) == (0, REDUCE_SCATTER)  # it goes before the other's all-gather
        rank.transport.done(front)
        (*_, gather) = rank.transport.wait_started(3)
        assert (gather.partition.index, gather.verb, gather.data) == (0, ALL_GATHER, front.data)
        assert not rank.group.proxies[0].is_open
        rank.transport.done(gather)
        rank.group.proxies[0].wait()
        assert not rank.group.proxies[2].is_open
        assert rank.group.active == 1
    finally:
        rank.core.close()


def test_whether_averages_are_split_changes_with_the_configuration() -> None:
    rank = Rank(0, WHOLE, ordered=False)
    try:
        rank.core.switch_at(SPLIT, {0: 1})
        for tensor in range(3):
            rank.group.notify_ready(tensor)
        for task in rank.transport.wait_started(3):
            assert task.verb == "all_reduce"
            rank.transport.done(task)
        rank.group.begin_step()
        rank.group.notify_ready(0)
        assert rank.transport.wait_started(4)[-1].verb == REDUCE_SCATTER
    finally:
        rank.core.close()


def test_what_a_transport_cannot_do_is_said_before_anything_begins() -> None:
    transport = RecordingTransport(ordered=True, channels=1)
    with pytest.raises(
        UnsupportedError, match="order='static' needs two channels, and RecordingTransport has one; use order=agreed"
    ):
        Core(transport, replace(WHOLE, order="static"), messenger=Sent())
    transport.verbs = frozenset({"all_reduce"})
    with pytest.raises(
        UnsupportedError, match="collective='rsag' averages by reduce-scatter and all-gather, which RecordingTransport"
    ):
        Core(transport, SPLIT, messenger=Sent())
    with pytest.raises(ConfigError, match="collective 'ring' is unknown; there are: all_reduce, rsag"):
        Core(transport, replace(WHOLE, collective="ring"), messenger=Sent())
