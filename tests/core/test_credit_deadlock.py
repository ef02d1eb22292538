"""Why credit comes back when a task's bytes have left, and not when its aggregate is there."""

import threading
from collections.abc import Iterator

import pytest

from commsched.core.core import Core
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Completion
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import CommTask
from commsched.testing.world import run_world
from tests.recording_transport import RecordingTransport

MANIFEST = Manifest((TensorSpec("front", (10,), "uint8"), TensorSpec("late", (10,), "uint8")))
CREDIT_OF_ONE_PARTITION = SchedulerConfig(partition_bytes=10, credit_bytes=10)


class Meeting:
    """Completes a partition when both ranks have started it. The numbers do not matter here."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[int, tuple[CommTask, Completion]] = {}

    def arrive(self, task: CommTask, completion: Completion) -> None:
        with self.lock:
            other = self.waiting.pop(task.partition.index, None)
            if other is None:
                self.waiting[task.partition.index] = (task, completion)
                return
        for its_task, its_completion in (other, (task, completion)):
            its_completion.on_done(its_task)


class SentAtOnce(RecordingTransport):
    """Credit comes back when the bytes have left, here at once."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank)
        self.meeting = meeting

    def start(self, task: CommTask, completion: Completion) -> None:
        super().start(task, completion)
        completion.on_sent(task)
        self.meeting.arrive(task, completion)


class SentWithTheAggregate(SentAtOnce):
    """Credit comes back with the aggregate: what a transport must not do."""

    def start(self, task: CommTask, completion: Completion) -> None:
        RecordingTransport.start(self, task, completion)
        self.meeting.arrive(task, completion)


class Rank:
    def __init__(self, transport: SentAtOnce) -> None:
        self.transport = transport
        self.core = Core(transport, CREDIT_OF_ONE_PARTITION)
        self.group: TensorGroup = self.core.add_group(cut(MANIFEST, 10), {"uint8": memoryview(bytearray(20))})
        self.group.begin_step()

    def becomes_ready(self, *tensors: int) -> None:
        """Each is started before the next becomes ready, unless the credit forbids it."""
        self.group.notify_ready(tensors[0])
        self.transport.wait_started(1)
        for tensor in tensors[1:]:
            self.group.notify_ready(tensor)

    def stands_still(self) -> bool:
        """One task is ready and cannot start: only a completion could move this rank."""
        with self.core._lock:
            return len(self.core._order) == 1 and self.core._order.next() is None


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    meeting = Meeting()
    ranks = [Rank(request.param(rank, meeting)) for rank in range(2)]
    yield ranks
    run_world(2, lambda rank: ranks[rank].core.close(), timeout_seconds=300)


@pytest.mark.parametrize("ranks", [SentAtOnce], indirect=True)
def test_opposite_orders_finish_when_credit_comes_back_at_sent(ranks: list[Rank]) -> None:
    def train(rank: int) -> None:
        ranks[rank].becomes_ready(*((1, 0) if rank == 0 else (0, 1)))
        ranks[rank].core.drain()

    run_world(2, train, timeout_seconds=300)
    assert all(proxy.is_open for rank in ranks for proxy in rank.group.proxies)


@pytest.mark.parametrize("ranks", [SentWithTheAggregate], indirect=True)
def test_the_same_orders_stall_when_credit_comes_back_with_the_aggregate(ranks: list[Rank]) -> None:
    ranks[0].becomes_ready(1, 0)
    ranks[1].becomes_ready(0, 1)
    # Each rank's credit is held by the partition that the other cannot start, and the network holds nothing it could finish.
    assert [rank.stands_still() for rank in ranks] == [True, True]
    assert [[task.partition.index for task in rank.transport.started] for rank in ranks] == [[1], [0]]
    assert not any(proxy.is_open for rank in ranks for proxy in rank.group.proxies)
