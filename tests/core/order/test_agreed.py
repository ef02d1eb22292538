"""AgreedOrder: whatever becomes ready when, however messages are delayed, all ranks launch the same, once, and never stop."""

from __future__ import annotations

import json
from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.core.errors import FEWER_BATCHES, OrderMismatch, PeerLost, ProtocolError
from commsched.core.order.messages import LARGEST, OTHERS, LaunchKey, from_runs, to_runs
from commsched.core.order.static import STABLE_STEPS
from commsched.core.policies import make_policy
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask

from .ranks import AGREED, NBYTES, STATIC, Ranks, make_task

TASKS = 5
KINDS_OF_LEADERS = ("TasksReady", "StaticStep", "LaunchRefused")


class Step:
    """All ranks' tasks of one step of one group, in an order of readiness each."""

    def __init__(self, ranks: Ranks, step: int, tasks: int = TASKS, group: int = 0) -> None:
        self.ranks = ranks
        self.tasks = [[make_task(step, partition, group=group) for partition in range(tasks)] for _ in range(ranks.size)]

    def run(self, orders: list[list[int]] | None = None) -> None:
        """Everything becomes ready, is launched and ends, as fast as it goes."""
        ranks = self.ranks
        for rank, tasks in enumerate(self.tasks):
            for partition in orders[rank] if orders else reversed(range(len(tasks))):
                ranks.add(rank, tasks[partition])
        self.finish()

    def finish(self) -> None:
        ranks, done = self.ranks, [0] * self.ranks.size
        everything = [task for tasks in self.tasks for task in tasks]
        while True:
            ranks.deliver_all()
            places = [(rank, task) for rank in range(ranks.size) for task in ranks.started[rank] if task in everything]
            if len(places) == sum(done):
                break
            for rank in range(ranks.size):
                mine = [task for r, task in places if r == rank]
                for task in mine[done[rank] :]:
                    ranks.sent(rank, task)
                done[rank] = len(mine)
        assert sum(done) == len(everything), f"of {len(everything)} tasks {sum(done)} were launched"


# Chance is a generator's: a draw of hypothesis for each of hundreds of events takes ten times as long as the event.
@settings(max_examples=60)
@given(
    chance=st.randoms(use_true_random=True),
    size=st.integers(1, 5),
    credit_bytes=st.sampled_from([1, NBYTES, 3 * NBYTES]),
    freeze=st.booleans(),
    steps=st.integers(1, 12),
    groups=st.integers(1, 2),
    shuffled=st.booleans(),
    channels=st.integers(1, 2),
    known=st.booleans(),
    per_host=st.integers(1, 3),
    recuts=st.sets(st.integers(1, 11), max_size=2),
)
def test_all_ranks_launch_the_same_whatever_the_delays(
    chance: Random,
    size: int,
    credit_bytes: int,
    freeze: bool,
    steps: int,
    groups: int,
    shuffled: bool,
    channels: int,
    known: bool,
    per_host: int,
    recuts: set[int],
) -> None:
    """``shuffled``: every step in another order. ``known``: the largest group has so many bytes as its tasks, so what is ready
    last is decided all at once. ``recuts``: the steps with another plan than the step before."""
    freeze = freeze and channels == 2
    tasks = TASKS if known else 2 * TASKS
    ranks = Ranks(size, credit_bytes=credit_bytes, freeze=freeze, channels=channels, tasks=tasks, per_host=per_host)
    usual = chance.sample(range(TASKS), TASKS)
    at = [[0] * groups for _ in range(size)]  # the next step of each rank and group
    waiting: list[list[CommTask]] = [[] for _ in range(size)]  # to become ready
    done: list[int] = [0] * size

    def finished(rank: int, group: int, step: int) -> bool:
        return step < 0 or all(
            sum(t.group == group and t.step == step for t in ranks.started[other][: done[other]]) == TASKS
            for other in range(size)
        )

    total = size * groups * steps * TASKS
    while sum(done) < total:
        events: list[tuple[str, int, int]] = [("deliver", *wire) for wire in ranks.busy]
        for rank in range(size):
            if waiting[rank]:
                events.append(("ready", rank, 0))
            # An average is in place when every rank has launched it.
            if done[rank] < len(ranks.started[rank]):
                key = LaunchKey.of(ranks.started[rank][done[rank]])
                if all(key in map(LaunchKey.of, reversed(ranks.started[other])) for other in range(size)):
                    events.append(("done", rank, 0))
            for group in range(groups):
                if at[rank][group] < steps and finished(rank, group, at[rank][group] - 1):
                    events.append(("begin", rank, group))
        assert events, f"deadlock: {[ranks.launched(rank, AGREED) for rank in range(size)]}"
        what, rank, other = chance.choice(events)
        if what == "deliver":
            ranks.deliver((rank, other))
        elif what == "ready":
            ranks.add(rank, waiting[rank].pop(0))
        elif what == "done":
            done[rank] += 1
            ranks.sent(rank, ranks.started[rank][done[rank] - 1])
        else:
            order = chance.sample(range(TASKS), TASKS) if shuffled else usual
            waiting[rank] += [make_task(at[rank][other], partition, group=other) for partition in order]
            if at[rank][other] in recuts:
                ranks.orders[rank].recut(other)
            at[rank][other] += 1
    leaders = sorted(set(ranks.leaders))
    assert all(ranks.kinds[rank, 0, kind] == 0 for rank in range(size) if ranks.is_led(rank) for kind in KINDS_OF_LEADERS)
    assert all(ranks.kinds[0, rank, "Launch"] == 0 for rank in range(size) if ranks.is_led(rank))
    for channel in range(channels):
        wanted = [LaunchKey.of(task) for task in ranks.on_channel(0, channel)]
        for rank in leaders:
            assert [LaunchKey.of(task) for task in ranks.on_channel(rank, channel)] == wanted
            assert [task.sequence for task in ranks.on_channel(rank, channel)] == list(range(len(wanted)))
    assert len(set(ranks.launched(0, AGREED) + ranks.launched(0, STATIC))) == groups * steps * TASKS


def test_a_task_waits_until_all_ranks_are_ready_and_others_do_not_wait_for_it() -> None:
    ranks = Ranks(2, credit_bytes=10 * NBYTES)
    front, late = (make_task(0, 0), make_task(0, 0)), (make_task(0, 1), make_task(0, 1))
    ranks.add(0, front[0])
    ranks.add(0, late[0])
    ranks.add(1, late[1])
    ranks.deliver_all()
    assert ranks.started == [[late[0]], [late[1]]]
    ranks.add(1, front[1])
    ranks.deliver_all()
    assert ranks.started == [[late[0], front[0]], [late[1], front[1]]]


def test_the_policy_orders_what_is_ready_on_all_ranks() -> None:
    ranks = Ranks(2, credit_bytes=1)
    Step(ranks, 0).run()
    assert [key.partition for key in ranks.launched(1, AGREED)] == [4, 0, 1, 2, 3]


def all_ready(ranks: Ranks, partitions: range, *, group: int = 0, verb: str = ALL_REDUCE) -> None:
    """The tasks of step 0 become ready on all ranks before rank 0 decides."""
    for rank in range(1, ranks.size):
        for partition in partitions:
            ranks.orders[rank].add(make_task(0, partition, group=group, verb=verb))
        ranks.settle(rank)
    for partition in partitions:
        ranks.orders[0].add(make_task(0, partition, group=group, verb=verb))
    ranks.deliver_all()


def announced(ranks: Ranks, group: int = 0) -> int:
    """How many launches of ``group`` rank 1 knows of."""
    return sum(task.group == group for queue in (*ranks.orders[1]._agreed, ranks.started[1]) for task in queue)


def test_when_the_last_of_the_largest_group_is_ready_all_launches_are_decided_at_once() -> None:
    ranks = Ranks(2, credit_bytes=2 * NBYTES, tasks=TASKS)
    all_ready(ranks, range(TASKS))
    assert announced(ranks) == TASKS
    ranks.messages = 0
    for started in range(2, TASKS + 1):
        for rank in range(2):
            assert [task.partition.index for task in ranks.started[rank]] == list(range(started))
            ranks.sent(rank, ranks.started[rank][started - 2])
    assert ranks.messages == 0


def test_while_tasks_are_missing_launches_are_decided_ahead_by_a_share_of_their_bytes() -> None:
    ranks = Ranks(2, credit_bytes=40 * NBYTES, tasks=320)
    all_ready(ranks, range(160, 320))
    assert announced(ranks) == 40 + 5  # the credit, and a 32nd part of what is missing


def test_launches_are_decided_ahead_by_a_quarter_of_the_credit_at_most() -> None:
    ranks = Ranks(2, credit_bytes=8 * NBYTES, tasks=320)
    all_ready(ranks, range(160, 320))
    assert announced(ranks) == 8 + 2


@pytest.mark.parametrize(("channels", "group", "verb"), [(1, 0, ALL_REDUCE), (2, 1, ALL_REDUCE), (2, 0, REDUCE_SCATTER)])
def test_other_launches_are_decided_as_far_as_the_credit_goes(channels: int, group: int, verb: str) -> None:
    """With one channel, of a smaller group, and before all-gathers that are more urgent."""
    ranks = Ranks(2, credit_bytes=2 * NBYTES, tasks=TASKS, channels=channels)
    all_ready(ranks, range(TASKS - group), group=group, verb=verb)
    assert announced(ranks, group) == 2


def test_what_is_decided_ahead_delays_no_other_group() -> None:
    ranks = Ranks(2, credit_bytes=NBYTES, tasks=TASKS)
    all_ready(ranks, range(TASKS))
    all_ready(ranks, range(1), group=1)
    for rank in range(2):
        assert [(task.group, task.channel) for task in ranks.started[rank]] == [(0, LARGEST), (1, OTHERS)]


def test_a_launch_on_another_channel_than_on_rank_0_is_refused() -> None:
    for channel in (OTHERS, 2, -1):
        ranks = Ranks(2)
        ranks.tamper = lambda to, message, channel=channel: {**message, "channel": channel}
        with pytest.raises(OrderMismatch, match=r"rank 1 cannot launch tensor 'layer0' \(step 0\) as rank 0 does"):
            all_ready(ranks, range(1))
        assert ranks.started[1] == []


@pytest.mark.parametrize("known", [True, False])
def test_launches_of_a_group_that_was_the_largest_keep_out_of_the_way_of_a_static_order(known: bool) -> None:
    """They were decided on before (``known``), or are decided on later: each rank launches one order on each channel."""
    ranks = Ranks(2, credit_bytes=NBYTES * 3 // 2, freeze=True, tasks=TASKS if known else 2 * TASKS)

    def add_step(number: int) -> list[list[CommTask]]:
        """Small tasks, which fit the credit beside a large one."""
        tasks = [[make_task(number, partition, group=1, nbytes=NBYTES // 2) for partition in range(3)] for _ in range(2)]
        for rank in range(2):
            for task in tasks[rank]:
                ranks.add(rank, task)
        ranks.deliver_all()
        return tasks

    for number in range(STABLE_STEPS + 1):
        for rank, tasks in enumerate(add_step(number)):
            for task in tasks:
                ranks.sent(rank, task)
            ranks.deliver_all()
    all_ready(ranks, range(TASKS))
    for order in ranks.orders:
        order.add_group(1, 3 * TASKS * NBYTES, may_freeze=True)  # now the largest
    done = [3 * (STABLE_STEPS + 1)] * 2
    if known:  # the bytes of rank 0 have left, and those of rank 1 have not
        for _ in range(TASKS):
            done[0] += 1
            ranks.sent(0, ranks.started[0][done[0] - 1])
    add_step(STABLE_STEPS + 1)
    assert [order.is_static for order in ranks.orders] == [True, True]
    while any(done[rank] < len(ranks.started[rank]) for rank in range(2)):
        for rank in (1, 0):  # in turn, so both are as far as each other's messages let them
            for task in ranks.started[rank][done[rank] :]:
                done[rank] += 1
                ranks.sent(rank, task)
            ranks.deliver_all()
    for channel in (OTHERS, LARGEST):
        first, second = ([LaunchKey.of(task) for task in ranks.on_channel(rank, channel)] for rank in range(2))
        assert first == second
    assert len(ranks.started[0]) == len(ranks.started[1]) == 3 * (STABLE_STEPS + 2) + TASKS


def test_what_becomes_ready_together_is_one_message() -> None:
    ranks = Ranks(2, credit_bytes=10 * NBYTES)
    for partition in range(TASKS):
        ranks.orders[1].add(make_task(0, partition))
    ranks.settle(1)
    assert len(ranks.wires[1, 0]) == 1


def test_two_tensors_that_rank_0_announces_in_another_order_are_named_and_not_launched() -> None:
    ranks = Ranks(2, credit_bytes=10 * NBYTES)

    def swap(to: int, message: dict) -> dict:
        [[*where, partitions]] = message["launch"]
        return {**message, "launch": [[*where, partitions[::-1]]]}

    ranks.tamper = swap
    for partition in (2, 1):
        ranks.orders[1].add(make_task(0, partition))
    ranks.settle(1)
    for partition in (2, 1):
        ranks.add(0, make_task(0, partition))
    with pytest.raises(
        OrderMismatch, match=r"^rank 1 launched tensor 'layer2' \(step 0\) where rank 0 launched tensor 'layer1' \(step"
    ):
        ranks.deliver_all()
    assert ranks.started[1] == []


def test_an_announcement_for_another_place_is_refused_and_not_launched() -> None:
    ranks = Ranks(2)
    ranks.tamper = lambda to, message: {**message, "first": message["first"] + 1}
    for rank in range(2):
        ranks.add(rank, make_task(0, 1))
    with pytest.raises(
        OrderMismatch, match=r"rank 1 launched tensor 'layer1' \(step 0\) where rank 0 launched nothing \(place 1\)"
    ):
        ranks.deliver_all()
    assert ranks.started[1] == []


def test_a_plan_that_is_cut_differently_is_named_and_not_launched() -> None:
    ranks = Ranks(2)
    ranks.add(0, make_task(0, 3))
    ranks.add(1, make_task(0, 3, start=8))
    with pytest.raises(
        OrderMismatch, match=r"rank 1 cannot launch tensor 'layer3' \(step 0\) as rank 0 does: .* cut its tensors diff"
    ):
        ranks.deliver_all()
    assert ranks.started[1] == []


@pytest.mark.parametrize("count", [-1, TASKS + 1])
def test_a_rank_that_cannot_have_launched_so_often_is_found_by_what_it_reports(count: int) -> None:
    ranks = Ranks(2, credit_bytes=10 * NBYTES)
    Step(ranks, 0).run()
    wrong = {"kind": "TasksReady", "ready": [], "freezes": 0, "launched": count, "digest": "x"}
    with pytest.raises(OrderMismatch, match=rf"rank 1 has launched {count} times, where rank 0 has decided on 5 launches"):
        ranks.orders[0].on_message(1, wrong)


def test_a_rank_that_launched_other_bytes_is_found_by_its_digest() -> None:
    ranks = Ranks(2, credit_bytes=10 * NBYTES)
    Step(ranks, 0).run()
    launched = ranks.launched(1, AGREED)
    wrong = {"kind": "TasksReady", "ready": [], "freezes": 0, "launched": len(launched), "digest": "x"}
    last = launched[-1].partition
    with pytest.raises(
        OrderMismatch, match=rf"^rank 1 launched other bytes than rank 0 for tensor 'layer{last}' \(step 0\), or "
    ):
        ranks.orders[0].on_message(1, wrong)


def test_a_static_order_keeps_to_the_credit() -> None:
    ranks, step = frozen()
    before = len(ranks.started[1])
    tasks = [make_task(step, partition) for partition in range(TASKS)]
    for task in reversed(tasks):
        ranks.add(1, task)
    assert len(ranks.started[1]) == before + 2  # its credit is that of two
    for launched in range(1, TASKS - 1):
        ranks.sent(1, ranks.started[1][before + launched - 1])
        assert len(ranks.started[1]) == before + launched + 2


def test_what_is_sent_behind_a_launch_has_the_policy_s_order_too() -> None:
    """Agreed on or static: replies and the launches of a host's leader go by it."""
    policy = make_policy("priority")
    for ranks, step in ((Ranks(2), 0), frozen()):
        for order in ranks.orders:
            tasks = [make_task(step, partition) for partition in range(TASKS)]
            assert [order.add(task) for task in tasks] == [policy.key(task) for task in tasks]


def test_reports_follow_what_was_launched() -> None:
    ranks = Ranks(3, credit_bytes=2 * NBYTES)
    for step in range(30):
        Step(ranks, step).run()
    assert len(ranks.orders[0]._decider._history) <= 3 * TASKS  # confirmed by every rank, and forgotten


def test_steps_that_are_alike_need_no_messages_until_the_plan_changes() -> None:
    ranks = Ranks(3, credit_bytes=2 * NBYTES, freeze=True)
    frozen_from = STABLE_STEPS + 1
    for step in range(frozen_from + 1):
        Step(ranks, step).run()
    ranks.messages = 0
    Step(ranks, frozen_from + 1).run()
    assert ranks.messages == 2  # each rank's digest
    assert {key.step for key in ranks.launched(1, STATIC)} == {frozen_from, frozen_from + 1}
    for order in ranks.orders:
        order.recut(0)
    Step(ranks, frozen_from + 2).run()
    assert {key.step for key in ranks.launched(1, AGREED)} == {*range(frozen_from), frozen_from + 2}


def test_an_order_may_become_static_from_any_moment_on_until_it_may_not() -> None:
    ranks = Ranks(2, credit_bytes=2 * TASKS * NBYTES)
    for step in range(STABLE_STEPS + 2):
        Step(ranks, step).run()
    for partition in reversed(range(TASKS)):
        if partition == TASKS // 2:
            for order in ranks.orders:
                order.let_freeze(True)
        for rank in range(2):
            ranks.add(rank, make_task(STABLE_STEPS + 2, partition))
        ranks.deliver_all()
    assert ranks.launched(1, STATIC) == []
    first = STABLE_STEPS + 3  # the first step that the pattern has seen from its beginning
    frozen_from = first + STABLE_STEPS + 1
    for step in range(first, frozen_from + 1):
        Step(ranks, step).run()
    assert {key.step for key in ranks.launched(1, STATIC)} == {frozen_from}
    for order in ranks.orders:
        order.let_freeze(False)
    Step(ranks, frozen_from + 1).run()  # a frozen order ends with a change of the plan only
    assert {key.step for key in ranks.launched(1, STATIC)} == {frozen_from, frozen_from + 1}
    for order in ranks.orders:
        order.recut(0)
    for step in range(frozen_from + 2, frozen_from + 2 * STABLE_STEPS):
        Step(ranks, step).run()
    assert {key.step for key in ranks.launched(1, STATIC)} == {frozen_from, frozen_from + 1}


def test_the_order_of_a_group_that_may_not_freeze_stays_agreed() -> None:
    ranks = Ranks(2, credit_bytes=2 * NBYTES, freeze=True)
    for order in ranks.orders:
        order.release(0)
        order.add_group(0, NBYTES * TASKS, may_freeze=False)
    run_until_frozen(ranks)
    assert ranks.launched(0, STATIC) == []


@pytest.mark.parametrize("asker", [0, 1, 3])
def test_a_static_order_ends_if_any_rank_asks_for_it(asker: int) -> None:
    """Rank 3 is led by another."""
    ranks = Ranks(4, credit_bytes=2 * NBYTES, freeze=True, per_host=2)
    step = run_until_frozen(ranks)
    assert not any(order.wants_change() for order in ranks.orders)
    for _ in range(2):
        ranks.orders[asker].keep_agreed(0)
        ranks.settle(asker)
    ranks.deliver_all()
    assert ranks.kinds[asker, 0, "KeepAgreed"] == (asker != 0)
    assert [order.wants_change() for order in ranks.orders] == [True, False, False, False]
    assert not ranks.orders[0].wants_change()
    for order in ranks.orders:
        order.recut(0)
    for _ in range(STABLE_STEPS + 2):
        Step(ranks, step).run()
        step += 1
    assert not any(order.is_static for order in ranks.orders)
    assert [order.may_freeze(0) for order in ranks.orders] == [False, *(rank != asker for rank in (1, 2, 3))]


def test_what_a_rank_says_of_a_group_that_rank_0_has_yet_to_add_is_not_lost() -> None:
    ranks = Ranks(2, credit_bytes=2 * NBYTES, freeze=True)
    ranks.orders[1].add_group(2, 100 * NBYTES, may_freeze=True)
    ranks.orders[1].keep_agreed(2)
    ranks.settle(1)
    ranks.deliver_all()
    ranks.orders[0].add_group(2, 100 * NBYTES, may_freeze=True)
    assert not ranks.orders[0].may_freeze(2)


def run_until_frozen(ranks: Ranks) -> int:
    """The next step."""
    for step in range(STABLE_STEPS + 2):
        Step(ranks, step).run()
    return STABLE_STEPS + 2


def frozen(size: int = 2) -> tuple[Ranks, int]:
    """Ranks with a static order, and the next step."""
    ranks = Ranks(size, credit_bytes=2 * NBYTES, freeze=True)
    return ranks, run_until_frozen(ranks)


def test_a_rank_that_ends_the_static_order_before_rank_0_is_not_forgotten() -> None:
    ranks, step = frozen()
    ranks.orders[1].recut(0)
    ours, theirs = make_task(step, 0), make_task(step, 0)
    ranks.add(1, theirs)
    ranks.deliver_all()
    ranks.orders[0].recut(0)
    ranks.add(0, ours)
    ranks.deliver_all()
    assert ranks.started[0][-1] is ours
    assert ranks.started[1][-1] is theirs
    assert [ranks.how[rank][-1] for rank in range(2)] == [AGREED, AGREED]


def test_another_group_is_agreed_on_while_one_is_static() -> None:
    ranks, step = frozen()
    Step(ranks, 0, tasks=1, group=1).run()
    assert ranks.launched(1, AGREED)[-1] == LaunchKey(1, 0, 0, "all_reduce")
    Step(ranks, step).run()


def test_a_released_group_makes_room_for_another() -> None:
    ranks, step = frozen()
    for order in ranks.orders:
        order.release(0)
    for step in range(STABLE_STEPS + 2):
        Step(ranks, step, group=1).run()
    assert [order.is_static for order in ranks.orders] == [True, True]
    assert ranks.launched(1, STATIC)[-1].group == 1


def test_what_ends_after_its_order_is_no_more_does_no_harm() -> None:
    ranks, step = frozen()
    last = Step(ranks, step)
    for rank in range(2):
        for task in reversed(last.tasks[rank]):
            ranks.orders[rank].add(task)
        ranks.settle(rank)
    ranks.orders[1].release(0)
    assert not ranks.orders[1].is_static
    for task in ranks.started[1][-2:]:
        ranks.sent(1, task)
    Step(ranks, 0, group=1).run()  # others go on


def test_only_the_largest_group_is_frozen() -> None:
    ranks = Ranks(2, credit_bytes=2 * NBYTES, freeze=True)
    for step in range(STABLE_STEPS + 2):
        Step(ranks, step, group=1).run()
    assert not any(order.is_static for order in ranks.orders)


def test_one_that_is_larger_and_comes_later_is_agreed_on() -> None:
    ranks, step = frozen()
    for order in ranks.orders:
        order.add_group(2, 100 * NBYTES, may_freeze=True)
    for other in range(STABLE_STEPS + 2):
        Step(ranks, other, group=2).run()
    Step(ranks, step).run()
    assert not any(order.wants_change() for order in ranks.orders)
    assert ranks.launched(1, STATIC)[-1] == (0, step, ranks.launched(1, STATIC)[-1].partition, "all_reduce")


def test_what_rank_0_announces_after_its_static_order_comes_after_the_rest_of_that_order_here() -> None:
    """An all-gather of few elements may need nothing of a rank that is late with it, so rank 0 can be done before."""
    ranks = Ranks(2, credit_bytes=10**9, freeze=True, tasks=2)

    def step_of_both(step: int, partitions: tuple[int, ...], verb: str, on: tuple[int, ...] = (0, 1)) -> None:
        for partition in partitions:
            for rank in on:
                ranks.add(rank, make_task(step, partition, verb=verb))
            ranks.deliver_all()

    step = 0
    while not ranks.orders[0].is_static:
        step_of_both(step, (1, 0), REDUCE_SCATTER)
        step_of_both(step, (1, 0), ALL_GATHER)
        step += 1
    for order in ranks.orders:
        order.add_group(2, 10**6, may_freeze=True)  # larger than the static one
    before = [len(started) for started in ranks.started]
    step_of_both(step, (1, 0), REDUCE_SCATTER)
    step_of_both(step, (1,), ALL_GATHER)
    step_of_both(step, (0,), ALL_GATHER, on=(0,))
    ranks.orders[0].recut(0)
    for rank in range(2):
        ranks.add(rank, make_task(0, 0, group=2, nbytes=500))
    ranks.deliver_all()
    step_of_both(step, (0,), ALL_GATHER, on=(1,))
    launched = [
        [(task.group, task.partition.index, task.verb, task.channel, task.sequence) for task in started[first:]]
        for started, first in zip(ranks.started, before)
    ]
    assert len(launched[0]) == 5
    assert launched[0] == launched[1]


def test_an_offer_that_is_heard_after_the_order_it_did_not_know_of_is_dropped() -> None:
    ranks, step = frozen(3)
    decider = ranks.orders[0]._decider
    ready = to_runs([LaunchKey(0, step - 1, 0, ALL_REDUCE)])
    old = {"kind": "TasksReady", "ready": ready, "freezes": 0, "launched": decider.decided, "digest": decider.digest}
    for order in ranks.orders:
        order.recut(0)
    ranks.orders[0].on_message(1, old)
    assert ranks.orders[0]._decider._offered == {}
    ranks.orders[0].leave(2)  # nothing waits for it


def test_a_static_order_that_changes_on_its_way_is_refused_and_both_tensors_are_named() -> None:
    ranks = Ranks(2, credit_bytes=2 * NBYTES, freeze=True)

    def swap(to: int, message: dict) -> dict:
        if message["kind"] == "Freeze":
            [[*_, partitions]] = message["keys"]
            partitions[1:3] = partitions[2:0:-1]
        return message

    ranks.tamper = swap
    with pytest.raises(
        OrderMismatch, match=r"rank 1 would launch tensor 'layer\d' .* where the static order of rank 0 has tensor 'l"
    ):
        run_until_frozen(ranks)
    assert ranks.launched(1, STATIC) == []


def test_a_static_order_of_another_plan_is_refused() -> None:
    ranks = Ranks(2, credit_bytes=2 * NBYTES, freeze=True)
    ranks.orders[1]._locate = lambda key: "other bytes"
    with pytest.raises(OrderMismatch, match=r"rank 1 has cut its tensors differently from rank 0: tensor 'layer\d'"):
        run_until_frozen(ranks)
    assert ranks.launched(1, STATIC) == []


def test_what_stands_behind_a_task_that_is_not_ready_is_stuck() -> None:
    ranks, step = frozen()
    for rank in range(2):
        ranks.add(rank, make_task(step, 0))
    assert [order.blocked_count(0) for order in ranks.orders] == [1, 1]
    assert ranks.orders[0].blocked_count(1) == 0
    for partition in range(1, TASKS):
        assert [order.blocked_count(0) for order in ranks.orders] != [0, 0]
        for rank in range(2):
            ranks.add(rank, make_task(step, partition))
    assert [order.blocked_count(0) for order in ranks.orders] == [0, 0]


def test_steps_of_another_pattern_end_a_static_order() -> None:
    ranks, step = frozen()
    other = [list(range(TASKS))] * 2
    for unusual in range(STABLE_STEPS):
        assert not any(order.wants_change() for order in ranks.orders)
        Step(ranks, step + unusual).run(other)
    assert [order.wants_change() for order in ranks.orders] == [True, True]
    Step(ranks, step + STABLE_STEPS).run(other)
    assert not ranks.orders[0].wants_change()


OTHER = [list(range(TASKS))] * 2


def test_each_static_order_that_does_not_fit_any_more_is_ended() -> None:
    ranks, step = frozen()
    for orders in (OTHER, None):
        for _ in range(STABLE_STEPS):
            Step(ranks, step).run(orders)
            step += 1
        assert [order.wants_change() for order in ranks.orders] == [True, True]
        for order in ranks.orders:
            order.recut(0)
        for _ in range(STABLE_STEPS + 2):
            Step(ranks, step).run(orders)
            step += 1
        assert [order.is_static for order in ranks.orders] == [True, True]


def test_a_step_of_another_pattern_now_and_then_ends_no_static_order() -> None:
    ranks, step = frozen()
    for number in range(2 * STABLE_STEPS + 1):
        Step(ranks, step + number).run(OTHER if number % 2 else None)
    assert not any(order.wants_change() for order in ranks.orders)


def test_steps_of_another_pattern_now_and_then_keep_an_order_from_being_static() -> None:
    ranks = Ranks(2, credit_bytes=2 * NBYTES, freeze=True)
    for step in range(4 * STABLE_STEPS):
        Step(ranks, step).run(OTHER if step % 3 == 2 else None)
    assert ranks.launched(0, STATIC) == []


def test_another_static_digest_is_an_error() -> None:
    ranks, step = frozen()
    Step(ranks, step).run()
    ranks.orders[0]._confirm_static(0, step + 1, "a")
    with pytest.raises(
        OrderMismatch, match=r"ranks 0 and 1 launched different tasks in the static order that begins with tensor 'layer"
    ):
        ranks.orders[0]._confirm_static(1, step + 1, "b")


def test_the_digest_of_an_order_that_has_ended_is_not_one_of_the_next() -> None:
    """The message was slow: another group, whose steps have the same numbers, is static by now."""
    ranks, step = frozen()
    Step(ranks, step).run()
    decider = ranks.orders[0]
    decider._confirm_static(0, step + 1, "a")
    late = {"kind": "StaticStep", "step": step + 1, "digest": "b", "freezes": decider._freezes - 1}
    decider.on_message(1, late)
    with pytest.raises(OrderMismatch):
        decider.on_message(1, {**late, "freezes": decider._freezes})


def test_splitting_orders_both_phases() -> None:
    ranks = Ranks(2, credit_bytes=1)
    scatter = [make_task(0, 1, verb=REDUCE_SCATTER) for _ in range(2)]
    for rank in range(2):
        ranks.add(rank, scatter[rank])
        ranks.add(rank, make_task(0, 2, verb=REDUCE_SCATTER))
    ranks.deliver_all()
    for rank in range(2):
        ranks.add(rank, make_task(0, 1, verb=ALL_GATHER))
    ranks.deliver_all()
    for rank in range(2):
        ranks.sent(rank, scatter[rank])
    ranks.deliver_all()
    assert [(key.partition, key.verb) for key in ranks.launched(1, AGREED)] == [(1, REDUCE_SCATTER), (1, ALL_GATHER)]


# --- leaving ---


def test_who_left_is_named_with_what_waits_for_it() -> None:
    ranks = Ranks(3)
    Step(ranks, 0).run()
    ranks.orders[0].leave(1)
    ranks.orders[2].leave(1)
    ranks.add(2, make_task(1, 4))
    with pytest.raises(PeerLost, match=r"^rank 1 left; tensor 'layer4' \(step 1\) waits for it; if it had fewer batches"):
        ranks.deliver_all()


def test_what_waits_already_fails_when_a_rank_leaves() -> None:
    ranks = Ranks(2)
    ranks.add(0, make_task(0, 2))
    with pytest.raises(PeerLost, match=r"^rank 1 left; tensor 'layer2' \(step 0\) waits for it; if it had fewer batches"):
        ranks.orders[0].leave(1)


def test_rank_0_left() -> None:
    ranks = Ranks(2)
    ranks.orders[1].leave(0)
    with pytest.raises(PeerLost, match=r"^rank 0 left; tensor 'layer2' \(step 0\) waits for it; if it had fewer batches"):
        ranks.add(1, make_task(0, 2))


def test_rank_0_leaves_who_is_ready() -> None:
    ranks = Ranks(2)
    ranks.add(1, make_task(0, 2))
    with pytest.raises(PeerLost, match=r"^rank 0 left; tensor 'layer2' \(step 0\) waits for it; if it had fewer batches"):
        ranks.orders[1].leave(0)


def test_who_leaves_before_the_order_is_static_is_named_in_that_too() -> None:
    ranks = Ranks(3, credit_bytes=2 * NBYTES, freeze=True)
    last = STABLE_STEPS + 1
    for step in range(last):
        Step(ranks, step).run()
    tasks = Step(ranks, last)
    for task in reversed(tasks.tasks[1]):
        ranks.add(1, task)
    ranks.orders[1].prepare_leave({0: last + 1})
    ranks.settle(1)
    ranks.deliver_all()
    for rank in (0, 2):
        for task in reversed(tasks.tasks[rank]):
            ranks.add(rank, task)
    tasks.finish()
    assert ranks.orders[2].is_static
    ranks.add(2, make_task(last + 1, 4))
    assert f"rank 1 left; tensor 'layer4' (step {last + 1}) waits for it" in str(ranks.orders[2].deadlock_error())


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("early", [True, False])
def test_who_leaves_a_static_order_is_named(leaver: int, early: bool) -> None:
    ranks, step = frozen(3)
    waiting = 2
    if early:
        ranks.add(waiting, make_task(step, 4))
    ranks.orders[leaver].prepare_leave({0: step})
    ranks.settle(leaver)
    ranks.deliver_all()
    if not early:
        assert ranks.orders[waiting].deadlock_error() is None
        ranks.add(waiting, make_task(step, 4))
    lost = f"rank {leaver} left; tensor 'layer4' (step {step}) waits for it{FEWER_BATCHES}"
    assert str(ranks.orders[waiting].deadlock_error()) == lost


def test_who_leaves_after_its_last_step_is_not_missed() -> None:
    ranks, step = frozen()
    last = Step(ranks, step)
    for rank in range(2):
        for task in reversed(last.tasks[rank]):
            ranks.orders[rank].add(task)
    for rank in range(2):
        ranks.settle(rank)
    ranks.orders[1].prepare_leave({0: step + 1})
    last.finish()
    assert [order.deadlock_error() for order in ranks.orders] == [None, None]


def test_who_leaves_within_a_step_is_missed_by_what_it_did_not_launch() -> None:
    ranks, step = frozen()
    first, second = ranks.launched(0, STATIC)[:2]
    for rank in range(2):
        ranks.add(rank, make_task(step, first.partition))
    ranks.orders[1].prepare_leave({0: step})
    ranks.settle(1)
    ranks.deliver_all()
    assert ranks.orders[0].deadlock_error() is None  # that was launched on both
    ranks.add(0, make_task(step, second.partition))
    assert f"rank 1 left; tensor 'layer{second.partition}'" in str(ranks.orders[0].deadlock_error())


# --- what is not a message ---


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "Nothing"},
        {"kind": "Launch", "first": 0},
        {"kind": "Launch", "first": "x", "launch": [], "digest": ""},
        {"kind": "Launch", "channel": 0, "first": 0, "launch": [[0, 0, 9, [0]]], "digest": ""},
        {"kind": "Launch", "channel": 0, "first": 0, "launch": [[0, 0, "0", [0]]], "digest": ""},
        {"kind": "Launch", "channel": 0, "first": 0, "launch": [[0, 0, 0, 0]], "digest": ""},
        {"kind": "Launch", "channel": 0, "first": 0, "launch": 7, "digest": ""},
        {"kind": "Freeze", "keys": [0], "digest": ""},
        {"kind": "Leaves", "rank": 1, "steps": [[1, 2]]},
    ],
)
def test_what_is_no_announcement(message: dict) -> None:
    with pytest.raises(ProtocolError, match="rank 0 announced a message that no order knows"):
        Ranks(2).orders[1].on_announced(message)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "TasksReady", "ready": [[0]], "freezes": 0, "launched": 0, "digest": ""},
        {"kind": "TasksReady", "ready": [], "freezes": 0, "digest": ""},
        {"kind": "StaticStep", "step": "x", "digest": "", "freezes": 1},
        {"kind": "StaticStep", "step": 1, "digest": ""},
    ],
)
def test_what_no_rank_tells(message: dict) -> None:
    with pytest.raises(ProtocolError, match="rank 1 sent rank 0 a message that no order knows"):
        Ranks(2).orders[0].on_message(1, message)


def test_each_message_goes_one_way() -> None:
    with pytest.raises(ProtocolError, match="rank 0 announced a message that only other ranks send: StaticStep"):
        Ranks(2).orders[1].on_announced({"kind": "StaticStep", "step": 1, "digest": "", "freezes": 1})
    with pytest.raises(ProtocolError, match="rank 1 sent rank 0 a message that only rank 0 sends: Freeze"):
        Ranks(2).orders[0].on_message(1, {"kind": "Freeze", "keys": [], "digest": ""})


keys = st.builds(LaunchKey, st.integers(0, 2), st.integers(0, 2), st.integers(0, 9), st.sampled_from([ALL_REDUCE, ALL_GATHER]))


@given(st.lists(keys))
def test_keys_keep_their_order_on_the_way(keys: list[LaunchKey]) -> None:
    assert from_runs(json.loads(json.dumps(to_runs(keys)))) == keys


def test_a_rank_for_which_its_leader_launches_reports_nothing() -> None:
    ranks = Ranks(4, per_host=2)
    with pytest.raises(ProtocolError, match="rank 1 sent rank 0 a message that only leaders of hosts send: TasksReady"):
        ranks.orders[0].on_message(1, {"kind": "TasksReady", "ready": [], "freezes": 0, "launched": 0, "digest": ""})


@pytest.mark.parametrize("leaver", [2, 3])
def test_who_left_another_host_is_named_with_what_waits_for_it(leaver: int) -> None:
    ranks = Ranks(4, per_host=2)
    for rank in range(4):
        ranks.add(rank, make_task(0, 0))
    for rank in (0, 1):
        ranks.add(rank, make_task(0, 1))
    ranks.deliver_all()
    assert [[task.partition.index for task in started] for started in ranks.started] == [[0], [0, 1], [0], [0]]
    with pytest.raises(PeerLost, match=rf"^rank {leaver} left; tensor 'layer1'"):
        ranks.orders[0].leave(leaver)


def test_a_contribution_is_made_at_once_and_a_launch_waits_for_all_contributions() -> None:
    ranks = Ranks(4, per_host=2)
    ranks.add(1, make_task(0, 0))
    assert len(ranks.started[1]) == 1
    for rank in (0, 2):
        ranks.add(rank, make_task(0, 0))
    ranks.deliver_all()
    assert ranks.started[0] == ranks.started[2] == []
    ranks.add(3, make_task(0, 0))
    ranks.deliver_all()
    assert [len(started) for started in ranks.started] == [1, 1, 1, 1]


@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_static_order_of_which_a_rank_hears_late_goes_on_where_the_rank_is(later: int) -> None:
    """``later``: the steps of the static order that rank 1 has contributed to before it hears of that order."""
    ranks = Ranks(4, per_host=2, freeze=True, credit_bytes=10 * NBYTES)
    for step in range(STABLE_STEPS + 1):
        Step(ranks, step).run()
    held = ranks.wires[0, 1] = Held()
    for step in range(STABLE_STEPS + 1, STABLE_STEPS + 1 + later):
        Step(ranks, step).run()
    first = [make_task(STABLE_STEPS + 1 + later, partition) for partition in range(TASKS)]
    for partition in (4, 1):
        ranks.add(1, first[partition])
    assert not ranks.orders[1].is_static
    if later == 0:  # the message is sent now
        for rank in (0, 2, 3):
            ranks.add(rank, make_task(STABLE_STEPS + 1, 4))
        ranks.deliver_all()
    held.is_held = False
    ranks.deliver_all()
    assert ranks.orders[1].is_static
    before = len(ranks.started[1])
    for partition in (3, 2, 0):
        ranks.add(1, first[partition])
    assert len(ranks.started[1]) == before + 3
    for rank in (0, 2, 3):
        for partition in (4, 3, 2, 1, 0)[later == 0 :]:
            ranks.add(rank, make_task(STABLE_STEPS + 1 + later, partition))
    ranks.deliver_all()
    assert all(len(started) == (STABLE_STEPS + 2 + later) * TASKS for started in ranks.started)
    for step in range(STABLE_STEPS + 2 + later, 3 * STABLE_STEPS + later):
        Step(ranks, step).run()
    assert not any(order.wants_change() for order in ranks.orders)  # it is what it is used to
    assert all(order.is_static for order in ranks.orders)


@pytest.mark.parametrize("later", [1, 2])
def test_a_static_order_of_which_a_rank_hears_when_it_has_ended_is_not_followed(later: int) -> None:
    """``later``: the steps of the static order, all of which rank 1 contributes to before it hears of that order."""
    ranks = Ranks(4, per_host=2, freeze=True, credit_bytes=10 * NBYTES)
    for step in range(STABLE_STEPS + 1):
        Step(ranks, step).run()
    held = ranks.wires[0, 1] = Held()
    ended = STABLE_STEPS + 1 + later
    for step in range(STABLE_STEPS + 1, ended):
        Step(ranks, step).run()
    assert [order.is_static for order in ranks.orders] == [True, False, True, True]
    for order in ranks.orders:
        order.recut(0)
        order._locate = lambda key: "elsewhere"  # the bytes of another plan
    task = make_task(ended, 4)
    ranks.add(1, task)
    held.is_held = False
    ranks.deliver_all()
    assert not ranks.orders[1].is_static
    for rank in (0, 2, 3):
        ranks.add(rank, make_task(ended, 4))
    ranks.deliver_all()
    for partition in (2, 0, 1, 3):
        for rank in range(4):
            ranks.add(rank, make_task(ended, partition))
        ranks.deliver_all()
    assert all(len(started) == (ended + 1) * TASKS for started in ranks.started)
    for step in range(ended + 1, ended + 2 * STABLE_STEPS):
        Step(ranks, step).run()
    assert all(order.is_static for order in ranks.orders)  # that of the new plan


def test_a_rank_that_has_not_heard_of_a_static_order_leaves_with_what_it_contributed() -> None:
    ranks = Ranks(4, per_host=2, freeze=True, credit_bytes=10 * NBYTES)
    for step in range(STABLE_STEPS + 1):
        Step(ranks, step).run()
    held, step = Held(), STABLE_STEPS + 1
    ranks.wires[0, 1] = held
    for rank in range(4):
        ranks.add(rank, make_task(step, 4))
    ranks.deliver_all()
    assert [order.is_static for order in ranks.orders] == [True, False, True, True]
    ranks.orders[1].prepare_leave({0: step})
    ranks.settle(1)
    ranks.deliver_all()
    for rank in (0, 2, 3):  # all ranks have launched it
        assert ranks.orders[rank].deadlock_error() is None
    ranks.add(2, make_task(step, 3))
    error = ranks.orders[2].deadlock_error()
    assert str(error).startswith("rank 1 left; tensor 'layer3'")


def test_a_static_order_of_a_group_that_the_rank_has_released_is_not_followed() -> None:
    ranks = Ranks(4, per_host=2, freeze=True, credit_bytes=10 * NBYTES)
    for step in range(STABLE_STEPS + 1):
        Step(ranks, step).run()
    held = ranks.wires[0, 1] = Held()
    Step(ranks, STABLE_STEPS + 1).run()
    ranks.orders[1].recut(0)
    ranks.orders[1]._locate = lambda key: "elsewhere"  # the bytes of another plan
    ranks.orders[1].release(0)
    held.is_held = False
    ranks.deliver_all()
    assert [order.is_static for order in ranks.orders] == [True, False, True, True]


class Held(deque[str]):
    """A wire whose messages are on the way until ``is_held`` is False."""

    is_held = True

    def __bool__(self) -> bool:
        return not self.is_held and len(self) > 0


def test_only_rank_0_is_told() -> None:
    with pytest.raises(ProtocolError, match="rank 0 sent rank 1 a message that only rank 0 receives"):
        Ranks(2).orders[1].on_message(0, {})


def test_another_policy_and_credit_count_for_what_waits() -> None:
    ranks = Ranks(2, credit_bytes=1, policy="fifo")
    for rank in range(2):
        for partition in (4, 3, 2, 1):
            ranks.add(rank, make_task(0, partition))
    ranks.deliver_all()
    for order in ranks.orders:
        order.reconfigure(make_policy("priority"), 2 * NBYTES)
    ranks.settle(0)
    ranks.deliver_all()
    assert [key.partition for key in ranks.launched(1, AGREED)] == [4, 1]


def test_there_is_no_work_while_a_task_waits_for_other_ranks() -> None:
    ranks = Ranks(2)
    leader, other = ranks.orders
    leader.add(make_task(0, 0))
    assert not leader.has_work()
    other.add(make_task(0, 0))
    assert other.has_work()  # it reports the task
    ranks.settle(1)
    assert not other.has_work()
    ranks.deliver_all()
    assert [len(started) for started in ranks.started] == [1, 1]
    for rank in range(2):
        ranks.orders[rank].sent(ranks.started[rank][0])
        assert not ranks.orders[rank].has_work()
