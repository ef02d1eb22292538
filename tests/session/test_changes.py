"""Changes of configuration that race with the steps, registrations and releases of groups: real cores under a real roster."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack

from hypothesis import given, settings
from hypothesis import strategies as st

from commsched.control.messages import PROTOCOL, Commit, Hello, Member, Message, Prepare, Prepared, Propose
from commsched.control.roster import Roster, Send
from commsched.core.core import Core
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Completion
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import CommTask
from commsched.version import __version__
from tests.recording_transport import RecordingTransport

MANIFEST = Manifest((TensorSpec("weight", (64,), "uint8"),))
GROUPS, PROPOSALS = 3, 4


class Immediate(RecordingTransport):
    """Has each average at once."""

    def start(self, task: CommTask, completion: Completion) -> None:
        completion.on_done(task)


class Rank:
    """One rank, whose moves the test chooses. It makes none that would wait."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.core = Core(Immediate(rank, job.size), SchedulerConfig(64, 64))
        self.groups: list[TensorGroup] = []
        self.partitions: list[list[int]] = []  # by group: how many partitions each step had
        self.reserved: list[SchedulerConfig] = []
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()

    def step(self, group: int) -> None:
        """Averaging keeps ranks within a step of each other."""
        if group >= len(self.groups) or self.groups[group].is_over:
            return
        mine = self.groups[group]
        if mine.next_step > self.job.slowest(group) or self.core._changes.is_held(mine):
            return
        mine.begin_step()
        self.partitions[group].append(len(mine.tasks))
        mine.notify_ready(0)

    def reserve(self, group: int) -> None:
        if len(self.reserved) == len(self.groups) == group and not self.core._changes.is_holding:
            self.reserved.append(self.core.reserve_group())

    def add(self, group: int) -> None:
        """Once all ranks have told their sizes, of which rank 0's count."""
        if len(self.groups) == group and all(len(rank.reserved) > group for rank in self.job.ranks):
            plan = cut(MANIFEST, self.job.ranks[0].reserved[group].partition_bytes)
            self.groups.append(self.core.add_group(plan, {"uint8": memoryview(bytearray(64))}))
            self.partitions.append([])

    def release(self, group: int) -> None:
        if group < len(self.groups) and not self.groups[group].is_over and self.groups[group].next_step > 1:
            self.groups[group].release()

    def propose(self, group: int) -> None:
        if self.job.proposals < PROPOSALS:
            self.job.proposals += 1
            self.job.ranks[0].outbox.append(Propose(self.job.latest.to_record()))

    def send(self, group: int) -> None:
        if self.outbox:
            self.job.deliver(self.job.roster.received(self.core._transport.rank, self.outbox.popleft(), 0.0))

    def take(self, group: int) -> None:
        match self.inbox.popleft() if self.inbox else None:
            case Prepare():
                self.outbox.append(Prepared(self.core.hold_steps()))
            case Commit(config, steps):
                self.core.switch_at(SchedulerConfig(**config), steps)


class Job:
    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [Rank(self, rank) for rank in range(size)]
        self.proposals = 0
        self.roster = Roster(size, "h", 1, fail_after_seconds=10.0, join_within_seconds=10.0, now=0.0)
        for rank in range(size):
            member = Member.rank(rank, size, "h")
            self.roster.received(rank, Hello(__version__, PROTOCOL, member, 10.0), 0.0)

    @property
    def latest(self) -> SchedulerConfig:
        return SchedulerConfig(64 >> self.proposals, 64)

    def slowest(self, group: int) -> int:
        return min(rank.groups[group].next_step if group < len(rank.groups) else 0 for rank in self.ranks)

    def deliver(self, sends: list[Send]) -> None:
        for send in sends:
            for connection in send.connections:
                self.ranks[connection].inbox.append(send.message)


MOVES = [Rank.step, Rank.step, Rank.reserve, Rank.add, Rank.release, Rank.propose, Rank.send, Rank.take]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.data())
def test_every_step_has_one_configuration_and_every_group_has_the_last_one(size: int, data: st.DataObject) -> None:
    moves = st.tuples(st.integers(0, size - 1), st.sampled_from(MOVES), st.integers(0, GROUPS - 1))
    job = Job(size)
    with ExitStack() as stack:
        for rank in job.ranks:
            stack.callback(rank.core.close)
        for rank, move, group in data.draw(st.lists(moves, max_size=100)):
            move(job.ranks[rank], group)
        if job.proposals == 0:
            job.ranks[0].propose(0)
        while any(rank.inbox or rank.outbox for rank in job.ranks):
            for rank in job.ranks:
                rank.send(0)
                rank.take(0)
        for group in range(GROUPS):
            for move in (Rank.reserve, Rank.add, *(4 + 2 * PROPOSALS) * [Rank.step]):
                for rank in job.ranks:
                    move(rank, group)

        for group in range(GROUPS):
            used = [rank.partitions[group] for rank in job.ranks]
            shortest = min(map(len, used))
            assert [each[:shortest] for each in used] == [used[0][:shortest]] * size
            if not any(rank.groups[group].is_over for rank in job.ranks):
                assert used[0][-1] == 64 // job.latest.partition_bytes
                assert [rank.core.config for rank in job.ranks] == [job.latest] * size
        for rank in job.ranks:
            waiting = {group for change in rank.core._changes.waiting for group in change.steps}
            assert not any(rank.groups[group].is_over for group in waiting)
