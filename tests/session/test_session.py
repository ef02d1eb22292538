"""A session composes control channel, transport and core; here with ranks as threads."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

import commsched
from commsched import ManifestMismatch, SchedulerConfig, Session
from commsched.control.events import Listener
from commsched.core.core import Core
from commsched.core.errors import FORKED, CommschedError, ConfigError, PeerLost, PeerTimeout, TransportError, UnsupportedError
from commsched.core.finite import LASTING_STEPS
from commsched.core.interfaces import Completion, ForwardingTransport, Observer, Transport
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.pace import EARLY_REPORTS, REPORT_STEPS
from commsched.core.stalls import StepOfGroup, Wait
from commsched.core.task import CommTask
from commsched.session.local import LocalControlWorld, local_sessions
from commsched.session.session import starting
from commsched.testing.world import run_world
from tests.recording_transport import RecordingTransport


def manifest(*sizes: int) -> Manifest:
    return Manifest(tuple(TensorSpec(f"t{index}", (size,), "float32") for index, size in enumerate(sizes)))


def buffers(described: Manifest) -> dict[str, memoryview]:
    return {dtype: memoryview(bytearray(size)) for dtype, size in described.buffer_bytes.items()}


def ranks(world_size: int, fn: Any, config: SchedulerConfig | None = None, **how: Any) -> list[Any]:
    """``fn(session)`` on every rank, each session closed in good order."""

    def rank_main(rank: int) -> Any:
        with sessions[rank] as session:
            return fn(session)

    sessions = local_sessions(world_size, config, **how)
    try:
        return run_world(world_size, rank_main, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def step(session: Session, group: Any, value: float) -> float:
    """Average ``value`` in every element; what is there afterwards."""
    view = group.buffers["float32"].cast("f")
    group.begin_step()
    for index in range(len(view)):
        view[index] = value
    for tensor in reversed(range(len(group.manifest.tensors))):
        group.notify_ready(tensor)
    for proxy in group.proxies:
        proxy.wait()
    assert len(set(map(repr, view))) == 1  # of NaN too
    return float(view[0])


def test_register_and_average() -> None:
    def main(session: Session) -> list[float]:
        described = manifest(10, 1000, 3)
        group = session.register(described, buffers(described))
        return [step(session, group, session.rank + number) for number in range(3)]

    assert ranks(3, main, SchedulerConfig(64, 128)) == [[1.0, 2.0, 3.0]] * 3


def test_manifests_that_differ_are_refused_on_every_rank() -> None:
    messages: dict[int, str] = {}

    def main(session: Session) -> None:
        described = manifest(10, 10 + session.rank)
        try:
            session.register(described, buffers(described))
        except commsched.ManifestMismatch as error:
            messages[session.rank] = str(error)

    ranks(3, main)
    assert messages == dict.fromkeys(range(3), "tensor 1 is 't1' float32[10] on rank 0 but 't1' float32[11] on rank 1")


@pytest.mark.parametrize("size", [0, 1, 3, 100_003])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_moves_any_bytes_exactly(size: int, root: int) -> None:
    sent = [os.urandom(size) for _ in range(3)]

    def main(session: Session) -> bytes:
        data = bytearray(sent[session.rank])
        session.broadcast("something", memoryview(data), root)
        return bytes(data)

    assert ranks(3, main, SchedulerConfig(1000, 3000)) == [sent[root]] * 3


def test_nothing_to_broadcast_and_a_broadcast_that_is_refused_leave_no_change_that_waits() -> None:
    changed = SchedulerConfig(300, 900)

    def main(session: Session) -> None:
        session.broadcast("nothing", memoryview(bytearray()))
        session.average(TensorSpec("nothing", (0,), "float32"), memoryview(bytearray()))
        with pytest.raises(ManifestMismatch):
            session.broadcast(f"of rank {session.rank}", memoryview(bytearray(8)))
        if session.rank == 0:
            session.reconfigure(changed)
        while not all(session.gather(session.core.config == changed)):
            pass
        assert session.core._changes.waiting == []

    ranks(2, main)


@pytest.mark.parametrize("numel", [0, 1, 1500])
def test_average_of_what_travels_once(numel: int) -> None:
    def main(session: Session) -> list[float]:
        groups: list[int] = []
        session.on_register(lambda group, _: groups.append(group))
        data = memoryview(bytearray(8 * numel))
        data.cast("d")[:] = memoryview(array("d", [float(session.rank)] * numel))
        session.average(TensorSpec("something", (numel,), "float64"), data)
        assert groups == []
        return data.cast("d").tolist()

    assert ranks(3, main, SchedulerConfig(1000, 3000)) == [[1.0] * numel] * 3


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda rank: ("x", memoryview(bytearray(4 * rank)), 0), "'x' uint8[0] on rank 0 but 'x' uint8[4] on rank 1"),
        (lambda rank: (f"x{rank}", memoryview(bytearray(4)), 0), "'x0' uint8[4] on rank 0 but 'x1' uint8[4] on rank 1"),
        (lambda rank: ("x", memoryview(bytearray(4)), rank), "'x' uint8[4] on rank 0 but 'x of rank 1' uint8[4] on rank 1"),
    ],
)
def test_broadcasts_that_differ_are_refused_on_every_rank(what: Callable[[int], Any], message: str) -> None:
    def main(session: Session) -> str:
        name, data, root = what(session.rank)
        data[:] = b"\7" * len(data)
        with pytest.raises(commsched.ManifestMismatch) as raised:
            session.broadcast(name, data, root)
        assert bytes(data) == b"\7" * len(data)  # as it was
        return str(raised.value)

    assert ranks(2, main) == [f"tensor 0 is {message}"] * 2


def test_what_cannot_be_averaged_in_place_is_refused() -> None:
    [session] = local_sessions(1)
    with pytest.raises(ValueError, match=r"^the memory to broadcast as 'x' is a bytearray; give a memoryview of its bytes$"):
        session.broadcast("x", bytearray(4))
    with pytest.raises(ValueError, match=r"^'x' cannot be broadcast from rank 1 of 1$"):
        session.broadcast("x", memoryview(bytearray(4)), 1)
    with pytest.raises(ValueError, match=r"^the buffer for float32 is a bytearray; give a memoryview of its bytes$"):
        session.register(manifest(1), {"float32": bytearray(4)})
    session.close()


def test_groups_of_plugins_are_told_from_those_of_the_user() -> None:
    [session] = local_sessions(1)
    gradients = session.register(manifest(4), buffers(manifest(4)))
    flags = Manifest((TensorSpec("commsched.used", (4,), "uint8"),))
    own = session.register(flags, buffers(flags))
    norms = session.add_norms(gradients, [2.0]) if session.can_measure_norms else None
    session.broadcast("buffers", memoryview(bytearray(4)))
    assert session.own_groups == {own.index} | ({own.index + 1} if norms is not None else set())
    session.close()


def test_gather_is_in_rank_order_and_may_be_repeated() -> None:
    assert (
        ranks(4, lambda s: [s.gather({"rank": s.rank}), s.gather(s.rank)])
        == [[[{"rank": r} for r in range(4)], [0, 1, 2, 3]]] * 4
    )


def test_a_value_that_is_refused_may_be_given_again() -> None:
    def rank_loop(rank: int) -> list[Any]:
        if rank == 1:
            with pytest.raises(TypeError):
                sessions[rank].gather(object(), "a file \udcff")
            with pytest.raises(UnsupportedError):
                sessions[rank].gather("x" * 70_000_000)
        return [sessions[rank].gather(value, "a file \udcff")[1] for value in (1, 2)]

    sessions = local_sessions(2)
    try:
        assert run_world(2, rank_loop) == [[1, 2]] * 2
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_a_gather_that_a_rank_does_not_take_part_in_says_what_it_is_for() -> None:
    with pytest.raises(CommschedError, match=r"rank 1 left, but other ranks wait for it to agree on a colour: every rank must"):
        ranks(2, lambda session: session.gather("red", "to agree on a colour") if session.rank == 0 else session.close())


def test_reconfigure_switches_all_ranks_at_the_same_step() -> None:
    def main(session: Session) -> list[int]:
        described = manifest(1000)
        group = session.register(described, buffers(described))
        partitions: list[int] = []

        def one_step() -> None:
            assert step(session, group, session.rank) == 0.5
            partitions.append(len(group.plan.partitions))

        for wanted, policy in ((2, "fifo"), (4, "priority"), (5, "fifo"), (8, "priority")):
            if session.rank == 0:
                session.reconfigure(SchedulerConfig(4000 // wanted, 10_000, policy))
            while not partitions or partitions[-1] != wanted:
                one_step()
        return partitions

    first, second = ranks(2, main, SchedulerConfig(4000, 8000))
    assert first == second
    assert sorted(set(first)) in ([1, 2, 4, 5, 8], [2, 4, 5, 8])


def test_a_group_is_cut_alike_while_a_change_has_come_to_some_ranks_only() -> None:
    """Ranks may be at different steps of other groups: rank 0's configuration counts."""

    def main(session: Session) -> list[int]:
        if session.rank == 1:
            session.core._changes.latest = SchedulerConfig(400, 800, "fifo")  # which rank 0 has yet to hear of
        described = manifest(1000)
        group = session.register(described, buffers(described))
        assert step(session, group, session.rank) == 0.5
        return [partition.nbytes for partition in group.plan.partitions]

    assert ranks(2, main, SchedulerConfig(2000, 4000)) == [[2000, 2000]] * 2


@pytest.mark.parametrize("late_ranks", [(1,), (0, 1)])
def test_a_change_reaches_a_group_that_some_or_all_ranks_are_about_to_add(late_ranks: tuple[int, ...]) -> None:
    """All have agreed on the sizes by which it is cut: either rank 1 adds it after the change, or all ranks do."""
    switched = [threading.Event(), threading.Event()]

    def main(session: Session) -> list[int]:
        tuner = Seen()
        tuner.on_switch = lambda *about: switched[session.rank].set()  # type: ignore[method-assign]
        session.use_tuner(tuner)

        def change() -> None:
            session.reconfigure(SchedulerConfig(1000, 8000), {"trial": 0})

        def before_it_is_added(*about: Any) -> None:
            if session.rank == 0:
                change()
            assert switched[session.rank].wait(60)

        if session.rank in late_ranks:
            session.on_register(before_it_is_added)
        described = manifest(1000)
        group = session.register(described, buffers(described))
        if session.rank not in late_ranks:
            change()
            assert switched[session.rank].wait(60)
        partitions = []
        for _ in range(3):
            assert step(session, group, session.rank) == 0.5
            partitions.append(len(group.plan.partitions))
        return partitions

    assert ranks(2, main, SchedulerConfig(4000, 8000)) == [[1, 4, 4]] * 2


class Seen(Observer):
    """An observer and a tuner; what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.switches: list[tuple[Any, dict[int, int]]] = []
        self.told: list[tuple[int, Any]] = []
        self.heard = threading.Semaphore(0)
        self.closed: list[bool] = []

    def on_step(self, group: int, step: int, at: float) -> None:
        self.steps.append((group, step))

    def on_switch(self, window: Any, steps: dict[int, int]) -> None:
        self.switches.append((window, dict(steps)))

    def on_message(self, rank: int, value: Any) -> None:
        self.told.append((rank, value))
        self.heard.release()

    def close(self, wait: bool) -> None:
        self.closed.append(wait)

    def on_leave(self, rank: int) -> None: ...


def test_observers_come_and_go() -> None:
    def main(session: Session) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        described = manifest(10)
        group = session.register(described, buffers(described))
        first, second = Seen(), Seen()
        forget = session.observe(first)
        step(session, group, 1.0)
        session.observe(second)
        step(session, group, 1.0)
        forget()
        step(session, group, 1.0)
        return first.steps, second.steps

    assert ranks(2, main) == [([(0, 0), (0, 1)], [(0, 1), (0, 2)])] * 2


def test_who_asks_is_told_of_gradients_but_not_of_broadcasts_and_the_plugins_own_tensors() -> None:
    reports = Manifest((TensorSpec("commsched.announced", (3,), "float64"),))

    def main(session: Session) -> list[tuple[int, Manifest]]:
        groups: list[tuple[int, Manifest]] = []
        session.on_register(lambda group, described: groups.append((group, described)))
        session.broadcast("something", memoryview(bytearray(5)))
        for described in (reports, manifest(10), manifest(20)):
            session.register(described, buffers(described))
        return groups

    assert ranks(2, main) == [[(2, manifest(10)), (3, manifest(20))]] * 2


def test_tuners_are_told_of_switches_and_rank_0s_of_reports() -> None:
    tuners = [Seen() for _ in range(3)]
    here = threading.Barrier(3)

    def main(session: Session) -> None:
        session.use_tuner(tuners[session.rank])
        described = manifest(10)
        group = session.register(described, buffers(described))
        here.wait(60)
        if session.rank == 0:
            session.reconfigure(SchedulerConfig(8, 8), {"trial": 3})
            session.reconfigure(SchedulerConfig(16, 16))  # nothing to be measured
        while session.core.config != SchedulerConfig(16, 16) or group.step < 10:
            step(session, group, 1.0)
            session.gather(1)  # else a rank might see the change a step before another, and end
        session.tell_tuner({"rank": session.rank})
        if session.rank == 0:
            assert all(tuners[0].heard.acquire(timeout=60) for _ in range(3))

    ranks(3, main)
    [switch] = tuners[0].switches
    assert switch[0] == {"trial": 3}
    assert switch[1][0] >= 1
    assert all(tuner.switches == [switch] for tuner in tuners)
    assert sorted(tuners[0].told, key=lambda told: told[0]) == [(rank, {"rank": rank}) for rank in range(3)]
    assert tuners[1].told == tuners[2].told == []
    assert [tuner.closed for tuner in tuners] == [[True]] * 3


def test_a_tuner_is_not_waited_for_when_a_rank_ends_by_an_exception() -> None:
    tuners = [Seen() for _ in range(2)]

    def main(session: Session) -> None:
        session.use_tuner(tuners[session.rank])
        raise ValueError("boom")

    with pytest.raises((ValueError, CommschedError), match="boom"):
        ranks(2, main)
    assert [tuner.closed for tuner in tuners] == [[False]] * 2


def test_an_exception_in_one_rank_reaches_the_others_by_name() -> None:
    raised: dict[int, BaseException] = {}

    def main(session: Session) -> None:
        described = manifest(10)
        try:
            group = session.register(described, buffers(described))
            if session.rank == 1:
                raise ValueError("boom")
            step(session, group, 1.0)
        except commsched.TransportError as error:
            raised[session.rank] = error
            raise

    with pytest.raises((ValueError, commsched.TransportError)):
        ranks(3, main)
    assert [str(raised[rank]) for rank in (0, 2)] == ["rank 1 ended: ValueError: boom"] * 2


def test_who_waits_too_long_is_told_for_whom_and_a_limit_ends_the_job() -> None:
    """Rank 1 lives and does not send."""
    over = threading.Event()

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.add(record.getMessage())

    def main(session: Session) -> None:
        group = session.register(manifest(3, 4), buffers(manifest(3, 4)))
        step(session, group, 1.0)
        group.begin_step()
        group.notify_ready(1)
        if session.rank == 1:
            assert over.wait(60)
        else:
            group.notify_ready(0)
        with pytest.raises(PeerTimeout, match=failure):
            group.proxies[0].wait()
        over.set()

    said: set[str] = set()
    note = Note()
    failure = r"rank 1 has not sent 't0'; rank [02] has waited \d s for the average of 't0' of step 1, and stall_after is 2 s"
    logging.getLogger("commsched").addHandler(note)
    try:
        ranks(3, main, SchedulerConfig(partition_bytes=12), warn_after_seconds=0.05, stall_after_seconds=2.0)
    except PeerTimeout:
        pass  # closing raises it once more
    finally:
        logging.getLogger("commsched").removeHandler(note)
    for rank in (0, 2):
        line = rf"rank {rank} has waited \d s for the average of 't0' of step 1: rank 1 has not sent 't0'"
        assert any(re.fullmatch(line, each) for each in said), said


@pytest.mark.parametrize(
    ("partition_bytes", "text"),
    [(12, "rank 1 has not sent 't0'"), (1000, "rank 1 has not sent 't0'"), (0, "rank 1 has not begun step 1")],
)
def test_a_tensor_is_waited_for_with_what_travels_with_it(partition_bytes: int, text: str) -> None:
    """With a partition for all tensors, t1's average cannot come before t0 is there."""
    there, over = threading.Event(), threading.Event()

    def main(session: Session) -> None:
        group = session.register(manifest(3, 4), buffers(manifest(3, 4)))
        step(session, group, 1.0)
        if session.rank == 1:
            if partition_bytes:
                group.begin_step()
                group.notify_ready(1)
            there.set()
            assert over.wait(60)
            if not partition_bytes:
                group.begin_step()
                group.notify_ready(1)
            group.notify_ready(0)
        else:
            group.begin_step()
            group.notify_ready(0)
            group.notify_ready(1)
            place = StepOfGroup(0, 1, 1 if partition_bytes == 1000 else 0)
            assert there.wait(60)
            session.core._stalls.waits(Wait("for it", place), 7.0)
            assert said.get(timeout=60) == f"rank 0 has waited 7 s for it: {text}"
            over.set()
        for proxy in group.proxies:
            proxy.wait()

    said: SimpleQueue[str] = SimpleQueue()
    note = logging.Handler()
    note.emit = lambda record: said.put(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commsched").addHandler(note)
    try:
        ranks(2, main, SchedulerConfig(partition_bytes or 12))
    finally:
        logging.getLogger("commsched").removeHandler(note)


def test_a_rank_that_is_slow_outside_waiting_is_named() -> None:
    """All ranks' steps take equally long."""

    def main(session: Session) -> None:
        group = session.register(manifest(3), buffers(manifest(3)))
        for _ in range(2 * REPORT_STEPS + 1):
            if session.rank == 1:
                time.sleep(0.03)  # far more than a busy machine takes for the others' steps
            step(session, group, 1.0)

    said: list[str] = []
    note = logging.Handler()
    note.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commsched").addHandler(note)
    try:
        ranks(3, main)
    finally:
        logging.getLogger("commsched").removeHandler(note)
    [line] = (line for line in said if "is slow" in line)
    assert re.match(r"rank 1 is slow: it takes \d+ ms of a step by itself, without waiting, and the other ranks \d+ ms", line)


def test_the_pace_of_groups_that_have_ended_is_not_kept_for_ever() -> None:
    """But that of the largest of them is, for the summary at the end of the job."""

    def main(session: Session) -> None:
        for tensors in (2, 3, 1, 2):
            group = session.register(manifest(tensors), buffers(manifest(tensors)))
            for _ in range(EARLY_REPORTS[0] + 1):
                step(session, group, 1.0)
            group.release()
        known = [index for index in range(4) if session.core.pace(index, 5) is not None]
        assert known == [1]
        assert {index for index in range(4) if session.core.own_parts(index)} <= {1}

    ranks(2, main)


@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)])
def test_ranks_that_train_on_the_same_batches_are_named_once(seeds: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    def main(session: Session) -> None:
        chance, described = random.Random(seeds[session.rank]), manifest(40, 60)
        group = session.register(described, buffers(described))
        view = group.buffers["float32"].cast("f")
        for _ in range(2 * EARLY_REPORTS[0]):
            group.begin_step()
            for index in range(len(view)):
                view[index] = chance.random()
            group.notify_all_ready((1, 0))
            for proxy in group.proxies:
                proxy.wait()
        session.gather(None)  # rank 0 has all reports
        assert session.stats()["same_gradients"] == ([0, 1] if session.rank == 0 and len(set(seeds)) == 1 else [])

    ranks(2, main, SchedulerConfig(partition_bytes=200))
    lines = [message for message in caplog.messages if "same" in message]
    assert len(lines) == (len(set(seeds)) == 1)
    assert all(
        line.startswith("all ranks had the same gradients in step 19, as ranks that train on the same batches have")
        for line in lines
    )


@pytest.mark.parametrize("nan_rank", [0, 2])
def test_the_rank_whose_gradients_were_the_first_that_are_not_finite_is_named_once(
    nan_rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An average makes NaN of the others' weights, and so of their gradients in the next step."""

    def main(session: Session) -> None:
        group = session.register(manifest(5, 3), buffers(manifest(5, 3)))
        view = group.buffers["float32"].cast("f")
        for number in range(3 + 3 * LASTING_STEPS):
            value = math.nan if number > 3 or (number == 3 and session.rank == nan_rank) else 1.0
            step(session, group, value)
            assert math.isnan(view[0]) == (number >= 3)

    ranks(3, main, SchedulerConfig(partition_bytes=8))
    others = ", ".join(str(rank) for rank in range(3) if rank != nan_rank)
    [line] = [message for message in caplog.messages if "finite" in message]
    assert line.startswith(
        f"rank {nan_rank} has had gradients that are not finite (NaN or infinite) in every step since step 3, 't"
    )
    assert f" among them, ranks {others} since step 4; training goes on" in line


def test_gradients_that_become_finite_again_are_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    """As where a loss is scaled, and steps are skipped until it fits."""

    def main(session: Session) -> None:
        group = session.register(manifest(5), buffers(manifest(5)))
        for number in range(2 * LASTING_STEPS):
            step(session, group, math.inf if session.rank == 1 and number % LASTING_STEPS else 1.0)

    ranks(2, main)
    assert not any("finite" in message for message in caplog.messages)


def test_a_rank_that_closes_early_is_named() -> None:
    def main(session: Session) -> None:
        described = manifest(10)
        group = session.register(described, buffers(described))
        for number in range(3 if session.rank == 1 else 100):
            step(session, group, float(number))

    with pytest.raises(commsched.PeerLost, match=r"rank 1 left.*'t0'.*step 3"):
        ranks(2, main)


def test_close_waits_for_all_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    ranks(3, lambda session: session.gather(1))
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("commsched-")]
    assert not left


def test_after_close_it_says_so() -> None:
    (session,) = local_sessions(1)
    described = manifest(4)
    group = session.register(described, buffers(described))
    assert step(session, group, 5.0) == 5.0
    session.close()
    session.close()
    for use in (session.gather, lambda _: session.register(described, buffers(described)), lambda _: group.begin_step()):
        with pytest.raises(commsched.ClosedError, match="closed"):
            use(None)


def test_close_calls_back_first_while_all_still_works() -> None:
    seen: list[float] = []

    def main(session: Session) -> None:
        described = manifest(4)
        group = session.register(described, buffers(described))
        session.on_close(lambda: seen.append(step(session, group, session.rank)))

    ranks(2, main)
    assert seen == [0.5, 0.5]


def test_what_a_callback_raises_while_one_rank_closes_is_told_to_all() -> None:
    told: dict[int, str] = {}

    def main(session: Session) -> None:
        def last_update() -> None:
            if session.rank == 1:
                raise ValueError("boom")

        session.on_close(last_update)
        try:
            session.close()
        except Exception as error:
            told[session.rank] = str(error)

    ranks(3, main)
    assert told == {0: "rank 1 ended: ValueError: boom", 1: "boom", 2: "rank 1 ended: ValueError: boom"}


def test_a_difference_that_is_found_when_all_have_left_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 1 has reported waits in rank 0's thread for callbacks until rank 0 waits for that."""
    sessions = local_sessions(2)
    add, control, waits = sessions[0]._comparison.add, sessions[0]._control, threading.Event()

    def add_late(rank: int, *reported: Any) -> None:
        if rank == 1:
            waits.wait(60)
        add(rank, *reported)

    def wait_for_callbacks(wait: Callable[[], None] = control.wait_for_callbacks) -> None:
        waits.set()
        wait()

    def close(rank: int) -> CommschedError | None:
        sessions[rank].compare("weights", 3, {"a": rank})
        try:
            sessions[rank].close()
        except CommschedError as error:
            return error
        return None

    monkeypatch.setattr(sessions[0]._comparison, "add", add_late)
    monkeypatch.setattr(control, "wait_for_callbacks", wait_for_callbacks)
    error = run_world(2, close, timeout_seconds=300)[0]
    assert str(error) == "weights differ between ranks after step 3: 'a' is 0 on rank 0 but 1 on rank 1"


def test_a_callback_may_take_itself_back_while_it_is_called() -> None:
    seen: list[str] = []
    [session] = local_sessions(1)

    def first() -> None:
        seen.append("first")
        forget()

    forget = session.on_close(first)
    session.on_close(lambda: seen.append("second"))
    session.close()
    assert seen == ["first", "second"]


def test_a_rank_that_ends_keeps_its_connections_until_the_job_knows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others hear of the closed connections first, and take them for the cause."""
    happened: list[str] = []
    [session] = local_sessions(1)
    report = session._control.report

    def decide(error: CommschedError) -> None:
        happened.append(str(error))
        report(error)

    monkeypatch.setattr(session._control, "report", lambda error: threading.Timer(0.1, decide, [error]).start())
    monkeypatch.setattr(session.transport, "close", lambda graceful: happened.append("closed"))
    session.abort("boom")
    assert happened == ["rank 0 ended: boom", "closed"]


@pytest.mark.parametrize(
    "lock",
    [
        lambda session: session.core._lock,
        lambda session: session._control._changed,
        lambda session: session._control._callbacks._changed,
    ],
    ids=["core", "control channel", "its callbacks"],
)
def test_a_handler_that_has_interrupted_commsched_closes_no_session_and_aborts_one_when_it_has_returned(lock: Any) -> None:
    """The end waits for threads that wait for a lock of the interrupted one."""
    [session] = local_sessions(1)
    step(session, session.register(manifest(1), buffers(manifest(1))), 1.0)

    def handle() -> None:
        with lock(session):
            with pytest.raises(UnsupportedError, match="has interrupted its thread within commsched"):
                session.close()
            assert not session.closed
            session.abort("SIGTERM")
            aborting.extend(each for each in threading.enumerate() if each.name == "commsched-abort")
            assert all(each.is_alive() for each in aborting)

    aborting: list[threading.Thread] = []
    interrupted = threading.Thread(target=handle, daemon=True)
    interrupted.start()
    interrupted.join(60)
    assert not interrupted.is_alive()
    [thread] = aborting
    thread.join(60)
    assert session.closed
    session.abort("too late")


def test_a_finalizer_that_runs_in_a_thread_of_commsched_closes_no_session() -> None:
    """The end waits for that thread."""
    [session] = local_sessions(1)
    refused: SimpleQueue[object] = SimpleQueue()

    def finalize() -> None:
        with pytest.raises(UnsupportedError) as raised:
            session.close()
        refused.put(raised.value)

    session._control._callbacks.put(finalize)
    assert "has interrupted its thread within commsched" in str(refused.get(timeout=60))
    assert not session.closed
    session.close()


@pytest.mark.parametrize(
    ("error", "reported"),
    [(PeerLost("rank 1 is gone"), PeerLost), (TransportError("no way"), TransportError), (ConfigError("no"), TransportError)],
)
def test_why_a_rank_cannot_start_is_reported_as_the_loss_of_a_rank_or_of_its_own(
    error: CommschedError, reported: type[CommschedError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for a better cause if the reported one is a lost rank."""
    told: list[CommschedError] = []

    [control] = LocalControlWorld(1).ends
    report = control.report
    monkeypatch.setattr(control, "report", lambda error: told.append(error) or report(error))
    with pytest.raises(type(error)) as raised, starting(control):
        raise error
    assert raised.value is error
    assert [(type(told[0]), str(told[0]))] == [(reported, f"rank 0 could not start: {error}")]


def test_a_rank_that_another_one_keeps_from_starting_raises_the_first_failure_and_what_it_saw_of_it() -> None:
    first, seen = TransportError("rank 1 could not start: no route"), PeerLost("a connection was closed")
    ours, other = LocalControlWorld(2).ends
    other.report(first)
    with pytest.raises(TransportError) as raised, starting(ours):
        raise seen
    other.close()
    assert str(raised.value) == str(first)
    assert raised.value.__cause__ is seen


def test_a_session_that_cannot_be_made_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TransportError("no session")

    monkeypatch.setattr("commsched.session.local.Session", fail)
    before = set(threading.enumerate())
    with pytest.raises(TransportError, match="no session"):
        local_sessions(1)
    assert [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("commsched-")] == []


# --- ordered transports ---


class Ordered(ForwardingTransport):
    """The local transport as if what it sends carried no identity; keeps what was started on each channel."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.ordered, self.channels = True, 2
        self.started: list[list[tuple[int, int, int]]] = [[], []]

    def start(self, task: CommTask, completion: Completion) -> None:
        assert task.sequence == len(self.started[task.channel])
        self.started[task.channel].append((task.group, task.step, task.partition.index))
        self._inner.start(task, completion)


@pytest.mark.parametrize("order", ["agreed", "static"])
def test_ranks_start_the_same_tasks_in_the_same_order_whatever_becomes_ready_first(order: str) -> None:
    transports: dict[int, Ordered] = {}
    static: list[bool] = []
    tensors, steps = 8, 12

    def ordered(transport: Transport) -> Transport:
        transports[transport.rank] = Ordered(transport)
        return transports[transport.rank]

    def main(session: Session) -> None:
        described = manifest(*[100] * tensors)
        group = session.register(described, buffers(described))
        view = group.buffers["float32"].cast("f")
        shuffle = random.Random(session.rank)
        for number in range(steps):
            group.begin_step()
            for index in range(len(view)):
                view[index] = session.rank + number
            # What is to become static has to repeat itself.
            for tensor in reversed(range(tensors)) if order == "static" else shuffle.sample(range(tensors), tensors):
                group.notify_ready(tensor)
            for proxy in group.proxies:
                proxy.wait()
            assert set(view) == {1.0 + number}
        static.append(session.core.is_static)

    ranks(3, main, SchedulerConfig(200, 600, order=order), wrap_transport=ordered)
    assert transports[1].started == transports[0].started
    assert transports[2].started == transports[0].started
    assert sum(map(len, transports[0].started)) == steps * tensors * 100 * 4 // 200
    assert static == [order == "static"] * 3


@pytest.mark.parametrize(("may_freeze", "from_the_beginning"), [(True, False), (False, False), (False, True)])
def test_an_order_becomes_static_if_the_group_allows_it_or_the_job_wants_it_from_the_beginning(
    may_freeze: bool, from_the_beginning: bool
) -> None:
    static = []

    def main(session: Session) -> None:
        described = manifest(*[100] * 4)
        group = session.register(described, buffers(described), may_freeze=may_freeze)
        if session.rank == 0:
            session.reconfigure(SchedulerConfig(200, 600, order="static"))
        for _ in range(12):
            group.begin_step()
            for tensor in reversed(range(4)):
                group.notify_ready(tensor)
            for proxy in group.proxies:
                proxy.wait()
        static.append(session.core.is_static)

    ranks(2, main, SchedulerConfig(200, 600, order="static" if from_the_beginning else "agreed"), wrap_transport=Ordered)
    assert static == [may_freeze or from_the_beginning] * 2


@pytest.mark.parametrize("asker", [None, 0, 1])
def test_a_static_order_ends_by_another_configuration_and_if_a_rank_says_so(asker: int | None) -> None:
    static: dict[int, list[bool]] = {0: [], 1: []}
    config = SchedulerConfig(200, 600)

    def main(session: Session) -> None:
        described = manifest(*[100] * 4)
        group = session.register(described, buffers(described), may_freeze=True)
        for step in range(40):
            if session.rank == 0 and step in (0, 20):
                session.reconfigure(replace(config, order="static" if step == 0 or asker is not None else "agreed"))
            if session.rank == asker and step == 18:
                group.keep_agreed()
            group.begin_step()
            for tensor in reversed(range(4)):
                group.notify_ready(tensor)
            for proxy in group.proxies:
                proxy.wait()
            static[session.rank].append(session.core.is_static)

    ranks(2, main, config, wrap_transport=Ordered)
    for each in static.values():
        assert each[17]
        assert not any(each[25:])


def test_what_other_ranks_say_before_this_one_has_opened_is_not_lost() -> None:
    ours, other = LocalControlWorld(2).ends
    other.listen(Listener())
    other.propose(SchedulerConfig(1, 2, "fifo").to_record())
    other.leave()
    transport = RecordingTransport(world_size=2)
    session = Session(ours, transport, Core(transport, SchedulerConfig(), on_failure=ours.report))
    other.wait_for_callbacks()
    ours.wait_for_callbacks()
    assert transport.left == [1]
    assert session.core.config == SchedulerConfig(1, 2, "fifo")
    session.close()
    other.close()


# --- what a transport cannot do ---


RSAG = r"^collective='rsag' averages by reduce-scatter and all-gather, which LocalTransport does not have"


def test_a_collective_that_the_transport_does_not_have_is_refused_at_once() -> None:
    config = SchedulerConfig(collective="rsag")
    with pytest.raises(commsched.UnsupportedError, match=RSAG):
        local_sessions(2, config)
    sessions = local_sessions(2)
    with pytest.raises(commsched.UnsupportedError, match=RSAG):
        sessions[0].reconfigure(config)
    for session in sessions:
        session.abort("the test is over")
    [session] = local_sessions(1, config)  # one rank has nothing to split
    session.reconfigure(config)
    session.close()
    with pytest.raises(commsched.ClosedError, match="closed"):
        session.reconfigure(SchedulerConfig())


# --- forks ---


FORKS = """
import os, signal
from commsched.core.errors import ClosedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.session.local import local_sessions
from commsched.session.session import starting

[session] = local_sessions(1)
described = Manifest((TensorSpec("weight", (2,), "float32"),))
group = session.register(described, {"float32": memoryview(bytearray(8))})
group.begin_step()
with group._core._lock:  # as another thread may hold it then
    child = os.fork()
if child == 0:
    signal.alarm(10)
    waits = {"proxy": group.proxies[0].wait, "ready": lambda: group.notify_ready(0), "step": group.begin_step}
    for name, call in {**waits, "gather": lambda: session.gather(0), "drain": session.core.drain}.items():
        try:
            call()
        except ClosedError as error:
            print(name, "raises", error, flush=True)
    session.close()
    os._exit(0)
print("the child ended with", os.waitpid(child, 0)[1], flush=True)
group.notify_ready(0)
group.proxies[0].wait()
session.close()
print("the rank goes on")
"""


def test_a_forked_process_waits_for_nothing_of_its_rank_which_goes_on() -> None:
    """It has none of the threads that would end a wait, and may have found a lock held."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300, check=False)
    calls = [f"{name} raises {FORKED}" for name in ("proxy", "ready", "step", "gather", "drain")]
    assert done.stdout.splitlines() == [*calls, "the child ended with 0", "the rank goes on"], done.stderr
