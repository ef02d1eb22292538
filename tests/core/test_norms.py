"""When the rows of norms travel, and what waits for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from commsched.core.core import Core
from commsched.core.errors import ManifestMismatch, ProtocolError
from commsched.core.group import TensorGroup
from commsched.core.manifest import Manifest, TensorSpec, require_equal
from commsched.core.norms import ROW_DTYPE, NormsOf, require_orders
from commsched.core.order.agreed import AgreedOrder
from commsched.core.plan import cut
from commsched.core.scheduler import LAST_KEY, SchedulerConfig
from commsched.core.stalls import StepOfGroup
from commsched.core.task import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, CommTask
from tests.recording_transport import RecordingTransport

from .test_core import in_thread, watch_waits

MANIFEST = Manifest(
    (TensorSpec("front", (10,), "float32"), TensorSpec("none", (0,), "float32"), TensorSpec("back", (9,), "float32"))
)
AMPLE = SchedulerConfig(partition_bytes=20, credit_bytes=1000)


class Silent:
    """A messenger whose messages reach nobody."""

    def send_to_rank_0(self, topic: str, value: Any) -> None: ...

    def announce(self, topic: str, value: Any, to: Sequence[int] = ()) -> None: ...

    def propose(self, config: dict[str, Any]) -> None: ...


class World:
    """A Core, with a group whose norms come in two rows."""

    def __init__(self, splits: bool, ordered: bool = False) -> None:
        self.transport = RecordingTransport(ordered=ordered, channels=1 + ordered)
        if not splits:
            self.transport.verbs = frozenset({ALL_REDUCE})
        self.failures: list[Exception] = []
        messenger = Silent() if ordered else None
        self.core = Core(self.transport, AMPLE, on_failure=self.failures.append, messenger=messenger)
        self.waits = watch_waits(self.core)
        self.group = self.add(MANIFEST)
        self.seen = 0
        self.rows: dict[int, list[CommTask]] = {}  # by group: started with the tasks of the last step

    def add(self, manifest: Manifest) -> TensorGroup:
        buffers = {dtype: memoryview(bytearray(nbytes)) for dtype, nbytes in manifest.buffer_bytes.items()}
        return self.core.add_group(cut(manifest, self.core.config.partition_bytes), buffers)

    def add_norms(self, group: TensorGroup | None = None) -> TensorGroup:
        group = self.group if group is None else group
        norms = NormsOf(group.index, group.next_step, (2.0,))
        elements = norms.row_elements(len(group.manifest.tensors))
        if ALL_GATHER in self.transport.verbs:
            return self.add(Manifest((TensorSpec("commsched.norms", (2, elements), ROW_DTYPE),), norms=norms))
        return self.add(
            Manifest(tuple(TensorSpec(f"commsched.norms.{row}", (elements,), ROW_DTYPE) for row in range(2)), norms=norms)
        )

    def started(self, count: int) -> list[CommTask]:
        """The ``count`` tasks that were started since the last call; no other is about to be started."""
        tasks = self.transport.wait_started(self.seen + count)[self.seen :]
        self.core.check()
        assert len(tasks) == count, tasks
        self.seen += count
        return tasks

    def begin(self, group: TensorGroup | None = None) -> list[CommTask]:
        """The tasks of a step whose gradients are all there."""
        group = self.group if group is None else group
        group.begin_step()
        group.notify_all_ready(range(len(group.manifest.tensors)))
        rows = 0 if group.splits else 2 * len(group.norms)
        tasks = self.started(len(group.tasks) + rows)
        self.rows[group.index] = tasks[len(group.tasks) :]
        return tasks[: len(group.tasks)]

    def rest(self, group: TensorGroup | None = None) -> list[CommTask]:
        """What follows the tasks of the step that was begun last, which are done: the rows and, if there are any, the
        all-gathers."""
        group = self.group if group is None else group
        return self.started(len(group.plan.partitions) + len(group.norms)) if group.splits else self.rows[group.index]

    def waiting(self, fn: Callable[[], object]) -> Future[object]:
        future = in_thread(fn)
        assert self.waits.acquire(timeout=60), "it did not wait"
        return future

    def done(self, tasks: list[CommTask]) -> None:
        for task in tasks:
            self.transport.done(task)


@pytest.fixture(params=[False, True], ids=["all_reduce", "splits"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    in_thread(world.core.close).result(60)


@pytest.fixture
def server() -> Iterator[World]:
    world = World(splits=False)
    yield world
    in_thread(world.core.close).result(60)


@pytest.fixture
def collectives() -> Iterator[World]:
    world = World(splits=True)
    yield world
    in_thread(world.core.close).result(60)


def test_rows_are_asked_for_when_all_contributions_are_started_and_come_behind_them(server: World) -> None:
    server.add_norms()
    server.group.begin_step()
    server.group.notify_all_ready((2, 1))
    tasks = server.started(2)
    server.done(tasks)
    assert server.transport.started[server.seen :] == []
    server.group.notify_ready(0)
    *tasks, first, second = server.started(4)
    assert {task.group for task in tasks} == {0}
    assert [(row.group, row.step, row.partition.index, row.verb, row.priority, row.order) for row in (first, second)] == [
        (1, 0, 0, ALL_REDUCE, 0, LAST_KEY),
        (1, 0, 1, ALL_REDUCE, 0, LAST_KEY),
    ]


def test_rows_are_gathered_when_all_reduce_scatters_are_done(collectives: World) -> None:
    collectives.add_norms()
    *tasks, last = collectives.begin()
    assert {task.verb for task in (*tasks, last)} == {REDUCE_SCATTER}
    collectives.done(tasks)
    collectives.started(len(tasks))  # their all-gathers
    collectives.transport.sent(last)
    assert collectives.transport.started[collectives.seen :] == []
    collectives.transport.done(last)
    first, second = collectives.started(2)
    assert (first.group, first.verb, first.priority) == (1, ALL_GATHER, 0)  # before the all-gather that was ready earlier
    assert (second.group, second.verb) == (0, ALL_GATHER)


def test_all_gathers_come_behind_all_reduce_scatters(collectives: World) -> None:
    def priorities() -> list[tuple[str, int]]:
        tasks = collectives.begin()
        collectives.done(tasks)
        rest = collectives.started(len(tasks) + len(collectives.group.norms))
        collectives.done(rest)
        return sorted((task.verb, task.priority) for task in (*tasks, *rest) if task.group == 0)

    collectives.core.switch_at(SchedulerConfig(20, 1000, collective="rsag"), {0: 0})
    assert priorities() == [*((ALL_GATHER, n) for n in range(4)), *((REDUCE_SCATTER, n) for n in range(4))]
    collectives.add_norms()
    assert priorities() == [*((ALL_GATHER, 4 + n) for n in range(4)), *((REDUCE_SCATTER, n) for n in range(4))]


def test_a_step_begins_when_the_norms_of_the_last_are_there(world: World) -> None:
    world.add_norms()
    tasks = world.begin()
    world.done(tasks)
    rest = world.rest()
    rows = [task for task in rest if task.group == 1]
    world.done([task for task in rest if task.group == 0])
    assert all(proxy.is_open for proxy in world.group.proxies)
    waiting = world.waiting(world.group.begin_step)
    assert world.core._waits[0]() == ("to begin step 1", StepOfGroup(0, 0, -1))
    world.done(rows)
    assert waiting.result(60) == 1


def test_the_step_under_way_has_no_norms(world: World) -> None:
    world.group.begin_step()
    norms = world.add_norms()
    world.group.notify_all_ready(range(3))
    tasks = world.started(4)
    world.done(tasks)
    assert {task.verb for task in tasks} == {ALL_REDUCE}
    assert world.transport.started[world.seen :] == []
    world.group.begin_step()
    more = world.add_norms()
    world.group.notify_all_ready(range(3))
    tasks = world.started(4 if world.group.splits else 6)[:4]
    assert {task.verb for task in tasks} == {REDUCE_SCATTER if world.group.splits else ALL_REDUCE}
    world.done(tasks)
    assert (norms.step, {task.step for task in norms.tasks}) == (1, {1})
    assert (more.step, more.tasks) == (1, ())


def test_each_group_has_norms_of_its_own(world: World) -> None:
    other = world.add(MANIFEST)
    world.add_norms(other)
    tasks = world.begin(other)
    mine = world.begin()
    assert {task.verb for task in mine} == {ALL_REDUCE}
    world.done(tasks)
    rest = world.rest(other)
    assert {task.group for task in rest if task.priority == 0 and task.partition.dtype == ROW_DTYPE} == {2}
    world.done([task for task in rest if task.group == 2])
    world.done(mine)
    assert world.begin()  # does not wait for averages or norms of the other group


def test_two_groups_of_norms_of_one_group(world: World) -> None:
    world.add_norms()
    world.add_norms()
    tasks = world.begin()
    world.done(tasks)
    rest = world.rest()
    rows = [task for task in rest if task.group > 0]
    assert sorted({task.group for task in rows}) == [1, 2]
    world.done([task for task in rest if task.group == 0])
    world.done(rows[:-1])
    waiting = world.waiting(world.group.begin_step)
    world.done(rows[-1:])
    assert waiting.result(60) == 1


def test_tensors_without_elements_have_norms(world: World) -> None:
    empty = world.add(Manifest((TensorSpec("none", (0,), "float32"),)))
    world.add_norms(empty)
    empty.begin_step()
    rows = world.started(1 if ALL_GATHER in world.transport.verbs else 2)
    world.done(rows)
    empty.notify_ready(0)
    assert empty.begin_step() == 1


def test_norms_are_never_cut_anew(world: World) -> None:
    norms = world.add_norms()
    plan = norms.plan
    for step, partition_bytes in enumerate((8, 1000)):
        world.core.switch_at(SchedulerConfig(partition_bytes, 1000), {0: step, 1: step})
        tasks = world.begin()
        assert len(tasks) == len(cut(MANIFEST, partition_bytes).partitions)
        assert norms.plan.partitions == plan.partitions
        assert world.group.splits == (ALL_GATHER in world.transport.verbs)
        world.done(tasks)
        world.done(world.rest())
    assert world.core.config.partition_bytes == 1000


def test_a_step_that_is_held_holds_its_norms(world: World) -> None:
    norms = world.add_norms()
    assert world.core.hold_steps() == {0: 1, 1: 1}
    tasks = world.begin()
    world.done(tasks)
    world.done(world.rest())
    waiting = world.waiting(world.group.begin_step)
    assert norms.step == 0
    world.core.switch_at(None, {0: 1, 1: 1})
    assert waiting.result(60) == 1
    assert norms.step == 1


def test_norms_are_released_with_their_group_when_they_are_there(world: World) -> None:
    norms = world.add_norms()
    tasks = world.begin()
    world.done(tasks)
    rest = world.rest()
    world.done([task for task in rest if task.group == 0])
    world.group.release()
    assert norms.is_over
    assert world.core.hold_steps() == {}
    world.done([task for task in rest if task.group == 1])
    in_thread(world.core.drain).result(60)
    in_thread(world.core.close).result(60)
    assert sorted(world.transport.released) == [0, 1]
    with pytest.raises(ValueError, match="group 0 was released"):
        world.group.open_step()


def test_a_group_that_is_released_within_a_step_still_tells_its_norms_to_other_ranks(world: World) -> None:
    world.add_norms()
    tasks = world.begin()
    world.group.release()
    world.done(tasks)
    rest = world.rest()
    assert 1 in {task.group for task in rest}
    world.done(rest)
    in_thread(world.core.drain).result(60)
    in_thread(world.core.close).result(60)
    assert sorted(world.transport.released) == [0, 1]
    assert world.failures == []


def test_norms_of_a_step_that_is_broken_off_are_released_with_their_group(world: World) -> None:
    world.add_norms()
    world.group.begin_step()
    world.group.notify_ready(0)
    tasks = world.started(2)
    world.group.release()
    world.done(tasks)
    world.done(world.started(2) if world.group.splits else [])
    in_thread(world.core.drain).result(60)
    in_thread(world.core.close).result(60)
    assert sorted(world.transport.released) == [0, 1]


def test_a_step_that_is_broken_off_leaves_no_norms_to_wait_for(world: World) -> None:
    world.add_norms()
    world.group.begin_step()
    world.group.notify_ready(0)
    tasks = world.started(2)
    world.done(tasks)
    world.done(world.started(2) if world.group.splits else [])
    in_thread(world.core.drain).result(60)


def test_a_wait_for_norms_is_about_the_averages(world: World) -> None:
    norms = world.add_norms()
    world.group.begin_step()
    wait = world.core._wait_for_proxy(norms.proxies[0])
    assert wait == ("for the norms of the averages of step 0", StepOfGroup(0, 0, -1))
    world.group.notify_ready(0)
    assert world.core._progress_of(wait.place).names == ["back"]


def test_rows_are_never_the_largest_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest group has a channel for launches that are decided ahead, and for a static order."""
    added: list[tuple[int, int]] = []
    monkeypatch.setattr(AgreedOrder, "add_group", lambda self, group, nbytes, may_freeze: added.append((group, nbytes)))
    world = World(splits=True, ordered=True)
    world.add_norms()
    assert added == [(0, MANIFEST.nbytes), (1, 0)]
    world.core.close()


def test_a_row_goes_to_the_server_that_makes_it() -> None:
    manifest = Manifest(tuple(TensorSpec(f"row{row}", (5,), ROW_DTYPE) for row in range(7)), norms=NormsOf(0, 0, (2.0,)))
    for sizes in (1, 8, 10**6):
        partitions = cut(manifest, sizes).partitions
        assert [(at.start, at.stop, at.tensors) for at in partitions] == [(40 * row, 40 * row + 40, (row,)) for row in range(7)]
        assert [at.server for at in partitions] == list(range(7))


@pytest.mark.parametrize("orders", [(2.0,), (math.inf, 0.5), (1.0, 2.0, 3.5)])
def test_a_manifest_of_rows_comes_back_from_its_record(orders: tuple[float, ...]) -> None:
    manifest = Manifest((TensorSpec("row", (5,), ROW_DTYPE),), norms=NormsOf(3, 7, orders))
    assert Manifest.from_record(manifest.to_record()) == manifest
    assert manifest.fingerprint != Manifest(manifest.tensors).fingerprint
    assert manifest.model_fingerprint == Manifest(manifest.tensors).model_fingerprint


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"tensors": []},
        {"norms": [0, 0, ["2.0"]]},
        {"tensors": {}, "norms": [0, 0, ["2.0"]]},
        {"tensors": [], "norms": [0, 0]},
        {"tensors": [], "norms": [0, 0, []]},
        {"tensors": [], "norms": [-1, 0, ["2.0"]]},
        {"tensors": [], "norms": [0, "0", ["2.0"]]},
        {"tensors": [], "norms": [0, 0, "2"]},
        {"tensors": [], "norms": [0, 0, ["nan"]]},
        {"tensors": [], "norms": [0, 0, ["2", "2"]]},
        {"tensors": [], "norms": [0, 0, [[]]]},
        {"tensors": [], "norms": None},
    ],
)
def test_a_wrong_record_is_refused(record: object) -> None:
    with pytest.raises(ProtocolError, match="not a manifest"):
        Manifest.from_record(record)


@pytest.mark.parametrize("orders", [(), (0,), (-1.0,), (-math.inf,), (math.nan,), (2.0, 2), range(1, 18)])
def test_orders_of_which_norms_cannot_be_put_together(orders: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="different numbers greater than 0"):
        require_orders(orders)


def test_ranks_between_other_steps_are_named() -> None:
    manifests = [Manifest((), norms=NormsOf(0, step, (2.0,))) for step in (4, 4, 5)]
    with pytest.raises(ManifestMismatch) as raised:
        require_equal(manifests)
    assert str(raised.value) == (
        "rank 0 registers norms of order 2 of group 0 from step 4 on, rank 2 norms of order 2 of group 0 from step 5 on"
    )
