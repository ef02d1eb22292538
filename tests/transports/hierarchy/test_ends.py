"""Each end of a link within a host against one that misbehaves."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from commsched.core.errors import ClosedError, CommschedError, PeerLost, ProtocolError, TransportError, UnsupportedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.task import CommTask
from commsched.testing import SimulatedDevice
from commsched.transports.backend import TransportContext
from commsched.transports.hierarchy import member as member_module
from commsched.transports.hierarchy import messages
from commsched.transports.hierarchy.leader import LeaderTransport
from commsched.transports.hierarchy.member import MemberTransport
from commsched.transports.hierarchy.messages import Kind, LocalMessage, UnixConnection, about
from commsched.transports.hierarchy.topology import HostTopology

from ..worlds import a_context

MANIFEST = Manifest((TensorSpec("weight", (4,), "float32"),))
AT = cut(MANIFEST, 100).partitions[0]


class Told:
    """Failures, and the callbacks of one job."""

    def __init__(self) -> None:
        self.failures: SimpleQueue[CommschedError] = SimpleQueue()
        self.done: SimpleQueue[CommTask] = SimpleQueue()
        self.when_failed: list[Callable[[CommschedError], None]] = []

    def context(self, rank: int, world_size: int) -> TransportContext:
        return replace(a_context(rank, world_size, self.failures.put), when_failed=self.when_failed.append)

    def on_sent(self, task: CommTask) -> None: ...

    def on_done(self, task: CommTask) -> None:
        self.done.put(task)

    def first(self) -> CommschedError:
        return self.failures.get(timeout=60)


@pytest.fixture
def told() -> Told:
    return Told()


def linked() -> tuple[UnixConnection, UnixConnection]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return UnixConnection(one), UnixConnection(other)


def make_task(step: int = 0) -> CommTask:
    return CommTask(0, step, AT, memoryview(bytearray(np.arange(4, dtype=np.float32).tobytes())))


@pytest.fixture
def member(told: Told):
    """A member, rank 5, and the link of its leader, rank 4."""
    link, leaders = linked()
    transport = MemberTransport(told.context(5, 8), link, 4, leaders=(), channels=1, norm_rows=0, servers=1)
    transport.add_group(0, MANIFEST)
    yield transport, leaders
    transport.close(graceful=False)
    leaders.close()


@pytest.fixture
def leader(told: Told):
    """A leader, rank 4, of a host that is alone, and the link of its member, rank 5."""
    link, members = linked()
    transport = LeaderTransport(told.context(4, 8), HostTopology(((4, 5),)), {5: link}, None)
    transport.add_group(0, MANIFEST)
    yield transport, members
    transport.close(graceful=False)
    members.close()


def give(link: UnixConnection, message: LocalMessage, fd: int) -> None:
    link.send(message, (fd,))
    os.close(fd)


# --- a member and what its leader may do ---


def test_a_member_puts_its_contribution_where_the_leader_reads_it_and_takes_the_average(member, told: Told) -> None:
    transport, leader = member
    task = make_task()
    transport.start(task, told)
    kinds, memories = [], {}
    for _ in range(3):
        message, fds = leader.receive()
        kinds.append(message.kind)
        memories[message.kind] = fds
    assert kinds == [Kind.GROUP, Kind.MEMORY, Kind.PUSH]
    assert message == about(Kind.PUSH, task)
    assert messages.read_manifest(memories[Kind.GROUP][0]) == MANIFEST
    mirror = messages.SharedBuffers(MANIFEST, messages.attach(memories[Kind.MEMORY][0]))
    assert mirror.part("float32", 0, 16) == task.data
    averages, fd = messages.create_buffers(MANIFEST, 0)
    averages.part("float32", 0, 16)[:] = np.full(4, 9, np.float32).tobytes()
    give(leader, LocalMessage(Kind.MEMORY, group=0), fd)
    leader.send(about(Kind.DONE, task))
    assert told.done.get(timeout=60) is task
    assert np.frombuffer(task.data, np.float32).tolist() == [9.0] * 4
    for fd in (*memories[Kind.GROUP], *memories[Kind.MEMORY]):
        os.close(fd)


class Pins(SimulatedDevice):
    """It pins memory so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def pin(self, memory: memoryview) -> memoryview:
        if self.left == 0:
            raise UnsupportedError("no more memory can be pinned")
        self.left -= 1
        return super().pin(memory)

    def wait_until_nothing_is_pinned(self) -> None:
        deadline = time.monotonic() + 60.0
        while self._all_pinned():  # a thread may still be returning from the call that used the memory
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def copies(self, memory: memoryview) -> bool:
        stream = self.stream()
        try:
            stream.copy(self.allocate(len(memory)), memory)
        except ValueError:
            return False
        stream.synchronize()
        return True


def test_little_memory_is_not_pinned(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    link, leader = linked()
    transport = MemberTransport(told.context(5, 8), link, 4, leaders=(), channels=1, norm_rows=0, servers=1)
    assert transport.mirror(0, Manifest((TensorSpec("weight", (2**20 - 8192,), "uint8"),)), Pins(0)) is None
    assert not caplog.records
    assert transport.mirror(1, Manifest((TensorSpec("weight", (2**20,), "uint8"),)), Pins(1)) is not None
    transport.close(graceful=False)
    leader.close()


@pytest.mark.usefixtures("everything_is_pinned")
@pytest.mark.parametrize("pins", [2, 1, 0])
def test_a_device_copies_from_and_to_what_ranks_share_if_it_is_pinned(
    told: Told, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, pins: int
) -> None:
    copied: list[int] = []
    copyto = np.copyto
    monkeypatch.setattr(member_module.np, "copyto", lambda to, from_: [copied.append(to.size), copyto(to, from_)])
    device, (link, leader) = Pins(pins), linked()
    transport = MemberTransport(told.context(5, 8), link, 4, leaders=(), channels=1, norm_rows=0, servers=1)
    mirror = transport.mirror(0, MANIFEST, device)
    assert (mirror is None) == (pins == 0)
    own = (mirror or {"float32": device.allocate_host(16)})["float32"]
    transport.add_group(0, MANIFEST)
    task = CommTask(0, 0, AT, own)
    own[:] = np.arange(4, dtype=np.float32).tobytes()
    transport.start(task, told)
    received = {message.kind: fds for message, fds in (leader.receive() for _ in range(3))}
    contributions = messages.SharedBuffers(MANIFEST, messages.attach(*received[Kind.MEMORY])).part("float32", 0, 16)
    assert contributions == own
    averages, fd = messages.create_buffers(MANIFEST, 0)
    average = averages.part("float32", 0, 16)
    average[:] = np.full(4, 9, np.float32).tobytes()
    give(leader, LocalMessage(Kind.MEMORY, group=0), fd)
    leader.send(about(Kind.DONE, task))
    assert told.done.get(timeout=60) is task
    assert np.frombuffer(task.data, np.float32).tolist() == [9.0] * 4
    assert device.copies(task.data)
    own[:], average[:] = bytes(16), b"\1" * 16
    assert contributions.tobytes() == (bytes(16) if pins > 0 else np.arange(4, dtype=np.float32).tobytes())
    assert task.data.tobytes() == (b"\1" if pins == 2 else b"\0") * 16
    assert copied == [16] * (2 - pins)
    said = "rank 5 copies gradients once more on their way from and to simulated:0: no more memory can be pinned"
    assert [record.getMessage() for record in caplog.records] == [said] * (pins < 2)
    transport.release(0)
    del task, own, mirror
    while not told.done.empty():
        told.done.get()
    device.wait_until_nothing_is_pinned()
    transport.close(graceful=False)
    leader.close()
    for fd in (*received[Kind.GROUP], *received[Kind.MEMORY]):
        os.close(fd)


@pytest.mark.usefixtures("everything_is_pinned")
def test_memory_for_a_group_that_is_not_added_ends_with_the_transport(told: Told) -> None:
    link, leader = linked()
    before = len(os.listdir("/proc/self/fd"))
    transport = MemberTransport(told.context(5, 8), link, 4, leaders=(), channels=1, norm_rows=0, servers=1)
    transport.mirror(0, MANIFEST, SimulatedDevice())
    assert len(os.listdir("/proc/self/fd")) == before + 2  # one is that of the mapping
    transport.close(graceful=False)
    leader.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            LocalMessage(Kind.DONE, step=3, partition=1),
            "sent an average of step 3, partition 1, not asked for",
        ),
        (
            LocalMessage(Kind.DONE, dtype="float32", stop=8),
            "sent an average of step 0, partition 0, not asked for",
        ),
        (about(Kind.DONE, make_task()), "sent an average of group 0 without its memory"),
        (LocalMessage(Kind.PUSH), "sent PUSH out of turn"),
        (LocalMessage(Kind.MEMORY), "sent MEMORY out of turn"),
    ],
)
def test_a_leader_that_breaks_the_protocol_is_named(member, told: Told, message: LocalMessage, why: str) -> None:
    transport, leader = member
    transport.start(make_task(), told)
    leader.send(message)
    error = told.first()
    assert isinstance(error, ProtocolError)
    assert str(error) == f"rank 4, which leads this host, {why}"


def test_a_leader_that_is_gone_is_named(member, told: Told) -> None:
    transport, leader = member
    leader.close()
    error = told.first()
    assert isinstance(error, PeerLost)
    assert str(error) == "rank 4, which leads this host, is gone: it ended the connection without a goodbye"
    with pytest.raises(PeerLost, match="rank 4, which leads this host, is gone: Broken pipe"):
        transport.start(make_task(), told)


def test_a_leader_that_closes_while_a_member_waits_is_named_with_what_waits(member, told: Told) -> None:
    transport, leader = member
    transport.start(make_task(7), told)
    leader.send(LocalMessage(Kind.GOODBYE))
    assert str(told.first()) == "rank 4, which leads this host, closed while tensor 'weight' of step 7 waits for it"


def test_a_goodbye_is_no_failure_and_closing_is_heard(member, told: Told) -> None:
    transport, leader = member
    leader.send(LocalMessage(Kind.GOODBYE))
    transport.leave(4)  # which knows it
    transport.close()
    transport.close()
    said = []
    while (received := leader.receive()) is not None:
        said.append((received[0].kind, received[0].rank))
        for fd in received[1]:
            os.close(fd)
    assert said == [(Kind.GROUP, 0), (Kind.GOODBYE, 0)]
    assert told.failures.empty()
    with pytest.raises(ClosedError, match="this transport is closed"):
        transport.start(make_task(), told)


def test_a_failure_of_the_job_ends_what_waits_for_a_leader_that_does_not_read(member, told: Told) -> None:
    transport, _ = member

    def fail() -> None:
        told.when_failed[0](PeerLost("rank 4 is gone"))

    timer = threading.Timer(0.5, fail)
    timer.start()
    tasks = map(make_task, range(100_000))
    with pytest.raises(PeerLost, match="rank 4, which leads this host, is gone"):
        list(map(transport.start, tasks, repeat(told)))
    timer.join()


def test_a_goodbye_does_not_wait_while_the_other_end_does_not_read() -> None:
    link, other = linked()
    with pytest.raises(BlockingIOError):
        list(map(partial(link.send, wait=False), repeat(LocalMessage(Kind.GOODBYE), 100_000)))
    for each in (link, other):
        each.close()


def out_of(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_member_without_memory_says_which_rank_it_is(member, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", out_of(errno.EMFILE))
    with pytest.raises(TransportError, match=r"^rank 5: \d+ bytes of shared memory cannot be allocated: Too many open files$"):
        member[0].start(make_task(), told)


def test_a_leader_that_cannot_map_what_it_gets_names_both_ranks(leader, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    member = leader[1]
    give(member, LocalMessage(Kind.GROUP, group=0), messages.write_manifest(MANIFEST, 5))
    _, fd = messages.create_buffers(MANIFEST, 5)
    attach = messages.attach
    monkeypatch.setattr(member_module, "attach", partial(_mapped_without_memory, attach, monkeypatch))
    give(member, LocalMessage(Kind.MEMORY, group=0), fd)
    failure = told.first()
    assert str(failure) == "rank 4 cannot receive from rank 5: shared memory cannot be mapped: Cannot allocate memory"
    assert failure.rank == 4


def _mapped_without_memory(attach: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fd: int) -> Any:
    monkeypatch.setattr(messages.mmap, "mmap", out_of(errno.ENOMEM))
    return attach(fd)


def test_a_descriptor_that_the_system_has_dropped_is_not_the_senders_fault() -> None:
    class Short:
        def recvmsg(self, *_: object) -> Any:
            return b"\x03" + bytes(messages._STRUCT.size - 1), [], socket.MSG_CTRUNC, None

    with pytest.raises(TransportError, match=r"this process has too many open files \(ulimit -n\)"):
        UnixConnection(Short()).receive()  # type: ignore[arg-type]


def test_a_leader_that_cannot_tell_a_living_member_of_its_average_says_so(leader, told: Told) -> None:
    transport, member = leader
    task = make_task()
    announce(member)
    member.send(about(Kind.PUSH, task))
    [connection] = transport._members
    tell = connection.link.send

    def without_memory(message: LocalMessage, *more: Any, **options: Any) -> None:
        if message.kind is Kind.DONE:
            out_of(errno.ENOBUFS)()
        tell(message, *more, **options)

    connection.link.send = without_memory
    transport.start(task, told)
    assert str(told.first()) == (
        "rank 4 to rank 5, step 0, partition 0 of group 0: DONE cannot be sent: No buffer space available"
    )


def test_no_program_that_a_rank_starts_gets_its_memory() -> None:
    one, other = linked()
    give(one, LocalMessage(Kind.MEMORY), messages.create_buffers(MANIFEST, 0)[1])
    received = other.receive()
    assert received is not None
    [fd] = received[1]
    assert not os.get_inheritable(fd)
    for each in (one, other):
        each.close()
    os.close(fd)


# --- a leader and what its member may do ---


def announce(member: UnixConnection, manifest: Manifest = MANIFEST) -> messages.SharedBuffers:
    give(member, LocalMessage(Kind.GROUP, group=0), messages.write_manifest(manifest, 5))
    mirror, fd = messages.create_buffers(manifest, 0)
    give(member, LocalMessage(Kind.MEMORY, group=0), fd)
    return mirror


def test_a_leader_averages_when_both_have_started(leader, told: Told) -> None:
    transport, member = leader
    task = make_task()
    announce(member).part("float32", 0, 16)[:] = np.full(4, 10, np.float32).tobytes()
    member.send(about(Kind.PUSH, task))
    transport.start(task, told)
    assert told.done.get(timeout=60) is task
    assert np.frombuffer(task.data, np.float32).tolist() == [5.0, 5.5, 6.0, 6.5]
    message, fds = member.receive()
    assert message.kind is Kind.MEMORY
    averages = messages.SharedBuffers(MANIFEST, messages.attach(fds[0]))
    assert averages.part("float32", 0, 16) == task.data
    message, _ = member.receive()
    assert message == about(Kind.DONE, task)
    os.close(fds[0])


@pytest.mark.usefixtures("everything_is_pinned")
@pytest.mark.parametrize("pins", [1, 0])
def test_a_leaders_device_copies_averages_from_what_ranks_share_if_it_is_pinned(leader, told: Told, pins: int) -> None:
    transport, member = leader
    device = Pins(pins)
    assert transport.mirror(0, MANIFEST, device) is None
    own = device.allocate_host(16)
    task = CommTask(0, 0, AT, own)
    announce(member).part("float32", 0, 16)[:] = np.full(4, 10, np.float32).tobytes()
    member.send(about(Kind.PUSH, task))
    transport.start(task, told)
    assert told.done.get(timeout=60) is task
    assert np.frombuffer(task.data, np.float32).tolist() == [5.0] * 4
    assert device.copies(task.data)
    own[:] = b"\1" * 16
    assert (task.data == own) == (pins == 0)
    _, fds = member.receive()
    if pins:
        averages = messages.SharedBuffers(MANIFEST, messages.attach(fds[0], writable=True))
        averages.part("float32", 0, 16)[:] = b"\2" * 16
        assert task.data.tobytes() == b"\2" * 16
    os.close(fds[0])
    transport.release(0)
    del task, own
    device.wait_until_nothing_is_pinned()


OTHER = Manifest((TensorSpec("weight", (5,), "float32"),))


@pytest.mark.parametrize(
    ("manifest", "message", "why"),
    [
        (OTHER, None, "tensor 0 is 'weight' float32[4] on rank 4 but 'weight' float32[5] on rank 5"),
        (
            MANIFEST,
            LocalMessage(Kind.PUSH, dtype="float32", stop=20),
            "rank 5 pushed float32 bytes 0 to 20 of step 0, but that ",
        ),
        (MANIFEST, LocalMessage(Kind.PUSH, group=2), "rank 5 pushed step 0 of group 2 without announcing the group"),
        (MANIFEST, LocalMessage(Kind.DONE), "rank 5 sent DONE out of turn"),
        (MANIFEST, LocalMessage(Kind.GROUP), "rank 5 sent GROUP out of turn"),
    ],
)
def test_a_member_that_breaks_the_protocol_is_named(
    leader, told: Told, manifest: Manifest, message: LocalMessage | None, why: str
) -> None:
    _, member = leader
    announce(member, manifest)
    if message is not None:
        member.send(message)
    assert str(told.first()).startswith(why)


def test_a_push_to_what_the_leader_has_released_is_refused(leader, told: Told) -> None:
    transport, member = leader
    announce(member)
    for step in range(2):
        member.send(about(Kind.PUSH, make_task(step)))
        if step == 0:
            transport.start(make_task(), told)
            told.done.get(timeout=60)
            transport.release(0)
    assert str(told.first()) == "rank 5 pushed step 1 of group 0 without its memory"
    for _ in range(2):  # the memory of the average, and that it is there
        for fd in member.receive()[1]:
            os.close(fd)


def test_a_leader_that_cannot_be_made_leaves_nothing_behind() -> None:
    before, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    link, members = linked()

    def refuse(callback: object) -> None:
        raise RuntimeError("no callbacks today")

    context = replace(a_context(4, 8, pytest.fail), when_failed=refuse)
    with pytest.raises(RuntimeError, match="no callbacks today"):
        LeaderTransport(context, HostTopology(((4, 5),)), {5: link}, None)
    members.close()
    assert set(threading.enumerate()) <= before  # what an earlier test has begun may end meanwhile
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_push_without_memory_is_refused(leader, told: Told) -> None:
    _, member = leader
    give(member, LocalMessage(Kind.GROUP, group=0), messages.write_manifest(MANIFEST, 5))
    member.send(about(Kind.PUSH, make_task()))
    assert str(told.first()) == "rank 5 pushed step 0 of group 0 without its memory"


def test_a_member_that_is_gone_is_named(leader, told: Told) -> None:
    _, member = leader
    member.close()
    assert str(told.first()) == "rank 5 is gone: it ended its connection to rank 4 without a goodbye"


def test_a_member_that_left_is_named_with_what_waits_for_it(leader, told: Told) -> None:
    transport, member = leader
    announce(member)
    transport.start(make_task(), told)
    member.send(LocalMessage(Kind.GOODBYE))
    assert str(told.first()) == "rank 5 left before its first step; the average of tensor 'weight' of step 0 waits for it"


def test_a_leader_that_left_is_named_with_what_waits_for_it(leader, told: Told) -> None:
    transport, member = leader
    announce(member)
    transport.leave(4)
    member.send(about(Kind.PUSH, make_task()))
    assert str(told.first()) == "rank 4 left before its first step; the average of tensor 'weight' of step 0 waits for it"


def test_closing_says_goodbye_and_a_closed_leader_starts_nothing(leader, told: Told) -> None:
    transport, member = leader
    member.send(LocalMessage(Kind.GOODBYE))
    transport.close()
    transport.close()
    kinds = []
    while (received := member.receive()) is not None:
        kinds.append(received[0].kind)
        for fd in received[1]:
            os.close(fd)
    assert kinds == [Kind.GOODBYE]
    assert told.failures.empty()
    with pytest.raises(ClosedError, match="this transport is closed"):
        transport.start(make_task(), told)
