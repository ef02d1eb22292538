"""Norms of averages through a session; here with ranks as threads."""

from __future__ import annotations

import math
import random
import threading
from typing import Any

import numpy as np
import pytest

from commsched import SchedulerConfig, Session
from commsched.core.errors import CommschedError, ManifestMismatch, PeerLost, TransportError, UnsupportedError
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Completion, ForwardingTransport, Transport
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.task import CommTask
from commsched.plugins.common.collectives import register_flat
from commsched.session.norms import Norms
from commsched.transports.averaging.norms import NormSums

from .test_session import ranks

MANIFEST = Manifest(
    (
        TensorSpec("front", (1000,), "float32"),
        TensorSpec("none", (0,), "float32"),
        TensorSpec("middle", (3, 50), "float64"),
        TensorSpec("back", (1, 4001), "float32"),
    )
)
SMALL = SchedulerConfig(1200, 4000)


def begin(session: Session, group: TensorGroup, views: list[Any]) -> None:
    """Begin a step with random gradients of this rank, from back to front."""
    chance = np.random.default_rng([session.rank, group.index, group.next_step])
    group.begin_step()
    for tensor in reversed(range(len(views))):
        views[tensor][...] = chance.normal(size=views[tensor].shape)
        group.notify_ready(tensor)


def require_norms_of(averages: list[Any], group: TensorGroup, norms: Norms) -> bytes:
    """Check ``norms`` against the averages of the step. Returns their bits."""
    told = [norms.of(order) for order in norms.orders]
    for proxy in group.proxies:
        proxy.wait()
    for order, values in zip(norms.orders, told):
        wanted = [np.linalg.norm(each.astype(np.float64).ravel(), order) if each.size else 0.0 for each in averages]
        assert values == pytest.approx(wanted, rel=1e-12)
    return b"".join(values.tobytes() for values in told)


def test_norms_are_those_of_the_averages_and_the_same_on_all_ranks() -> None:
    def main(session: Session) -> list[bytes]:
        group, views = register_flat(session, MANIFEST)
        other, more = register_flat(session, MANIFEST)
        assert session.can_measure_norms
        seen, norms = [], None
        for step in range(6):
            if step == 2:
                threading.Event().wait(random.random() * 0.02)  # ranks come at different times, averages are on the way
                norms = session.add_norms(group, (2, math.inf, 1, 3.5))
            if step == 3:
                of_other = session.add_norms(other, (2,))
            begin(session, group, views)
            begin(session, other, more)
            if norms is not None:
                seen.append(require_norms_of(views, group, norms))
                assert norms.is_open
            if step >= 3:
                seen.append(require_norms_of(more, other, of_other))
        return seen

    first, *others = ranks(3, main, SMALL)
    assert len(set(first)) == 4 + 3
    assert others == [first] * 2


@pytest.mark.parametrize("partition_bytes", [100, 5000, 10**6])
def test_another_cut_gives_the_same_norm_in_32_bits(partition_bytes: int) -> None:
    def main(session: Session) -> list[float]:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2, math.inf))
        begin(session, group, views)
        return [float(each) for order in norms.orders for each in norms.of(order).astype(np.float32)]

    (first, _), (again, _) = ranks(2, main, SchedulerConfig(partition_bytes, 10**6)), ranks(2, main, SMALL)
    assert first == again


def test_norms_are_told_while_configurations_change() -> None:
    def main(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2, math.inf))
        for step in range(60):
            if session.rank == 0 and step % 5 == 2:
                session.reconfigure(
                    SchedulerConfig(random.choice((100, 3000, 10**6)), 4000, random.choice(("fifo", "priority")))
                )
            begin(session, group, views)
            require_norms_of(views, group, norms)
        assert session.core.agreed_count > 5

    ranks(2, main, SMALL)


def test_norms_of_one_rank() -> None:
    def main(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2,))
        for _ in range(2):
            begin(session, group, views)
            require_norms_of(views, group, norms)

    ranks(1, main, SMALL)


def test_of_raises_before_the_first_step_and_for_other_orders() -> None:
    def main(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        begin(session, group, views)
        norms = session.add_norms(group, (2,))
        assert norms.is_open  # there is nothing to wait for
        with pytest.raises(ValueError, match="no step of the group has begun since its norms were added: step 1 is the first"):
            norms.of(2)
        with pytest.raises(ValueError, match=r"norms of order 1 were not added; there are: 2\.0"):
            norms.of(1)
        begin(session, group, views)
        require_norms_of(views, group, norms)
        group.release()
        with pytest.raises(ValueError, match="group 0 was released"):
            session.add_norms(group, (2,))

    ranks(1, main)


def test_norms_that_differ_are_refused_on_every_rank() -> None:
    said: dict[int, str] = {}

    def main(session: Session) -> None:
        group, _ = register_flat(session, MANIFEST)
        with pytest.raises(ManifestMismatch) as raised:
            session.add_norms(group, (2 + session.rank,))
        said[session.rank] = str(raised.value)
        norms = session.add_norms(group, (2,))  # the session goes on
        begin(session, group, group_views(group))
        norms.wait()

    def group_views(group: TensorGroup) -> list[Any]:
        return [np.zeros(spec.shape) for spec in group.manifest.tensors]

    ranks(2, main)
    assert said == dict.fromkeys(
        range(2),
        "rank 0 registers norms of order 2 of group 0 from step 0 on, rank 1 norms of order 3 of group 0 from step 0 on",
    )


class Incapable(ForwardingTransport):
    def norm_rows(self, manifest: Manifest) -> int:
        return 0


class Wide(ForwardingTransport):
    def norm_rows(self, manifest: Manifest) -> int:
        return 10_000


@pytest.mark.parametrize(
    ("wrap", "dtype", "message"),
    [
        (Incapable, "float32", "Incapable cannot tell norms of the averages of these tensors before the averages"),
        (
            Wide,
            "float32",
            "the sums for the norms of 20 tensors, from 10000 ranks or servers, would take 3280000 bytes of each",
        ),
        (ForwardingTransport, "uint8", r"tensor 'x0' uint8\[1\] is summed and not averaged, so it has no norm"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_the_session_goes_on(wrap: type[Transport], dtype: str, message: str) -> None:
    manifest = Manifest(tuple(TensorSpec(f"x{n}", (1,), dtype) for n in range(20)))

    def main(session: Session) -> None:
        group, views = register_flat(session, manifest)
        assert session.can_measure_norms == (wrap is not Incapable)
        with pytest.raises(UnsupportedError, match=message):
            session.add_norms(group, (2,))
        begin(session, group, views)
        group.proxies[0].wait()

    ranks(2, main, wrap_transport=wrap)


# --- what must never be taken for a norm ---


def failing(world_size: int = 2) -> str:
    """Two steps with norms, of which the last fails alike on every rank; what the failure says."""
    said: set[str] = set()

    def main(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2,))
        begin(session, group, views)
        norms.of(2)
        begin(session, group, views)
        try:
            norms.of(2)
        except TransportError as error:
            said.add(str(error))
            raise

    with pytest.raises(TransportError):
        ranks(world_size, main, SMALL)
    (message,) = said
    return message


def test_an_average_that_is_not_in_the_sums_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    add = NormSums.add

    def add_late(self: NormSums, *args: Any) -> None:
        step, _, start, _ = args
        if (step, start) != (1, 0):
            add(self, *args)

    monkeypatch.setattr(NormSums, "add", add_late)
    assert failing() == "the norm of 'front' of step 1 covers 750 of 1000 elements"


def test_sums_that_are_added_twice_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    add = NormSums.add

    def add_twice(self: NormSums, *args: Any) -> None:
        add(self, *args)
        if args[0] == 1:
            add(self, *args)

    monkeypatch.setattr(NormSums, "add", add_twice)
    assert failing() == "the norm of 'front' of step 1 covers 2000 of 1000 elements"


def test_a_row_of_another_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    take, kept = NormSums.take_row, []

    def take_old(self: NormSums, step: int) -> Any:
        kept.append(take(self, step))
        return kept[0]

    monkeypatch.setattr(NormSums, "take_row", take_old)
    assert failing() == "row 0 of the norms of step 1 is that of step 0"


# --- failures ---


class Held(ForwardingTransport):
    """Rows never come."""

    def start(self, task: CommTask, completion: Completion) -> None:
        if task.group == 0:
            super().start(task, completion)


def test_a_rank_that_leaves_is_named_to_those_who_wait_for_norms() -> None:
    begun = threading.Barrier(2)

    def main(session: Session) -> str:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2,))
        begin(session, group, views)
        norms.wait()
        begun.wait(60)
        if session.rank == 1:
            return ""
        begin(session, group, views)
        with pytest.raises(PeerLost) as raised:
            norms.wait()
        return str(raised.value)

    with pytest.raises(PeerLost, match="rank 1 left"):
        ranks(2, main, SMALL)


def test_a_rank_that_releases_the_group_still_tells_its_norms_to_the_others() -> None:
    def main(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2,))
        for _ in range(3):
            begin(session, group, views)
        if session.rank == 1:
            require_norms_of(views, group, norms)
        group.release()
        other, views = register_flat(session, MANIFEST)
        begin(session, other, views)

    ranks(2, main, SMALL)


def test_waits_for_norms_end_with_the_job() -> None:
    begun = threading.Barrier(2)

    def main(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2,))
        begin(session, group, views)
        for proxy in group.proxies:
            proxy.wait()
        assert not norms.is_open
        begun.wait(60)
        if session.rank == 1:
            raise RuntimeError("a bug in the training")
        norms.of(2)

    with pytest.raises((RuntimeError, CommschedError), match="a bug in the training"):
        ranks(2, main, SMALL, wrap_transport=Held)


def test_who_is_late_is_said_of_the_averages(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that waits for norms names the gradients that another rank has not sent."""
    told = threading.Event()

    def main(session: Session) -> None:
        group, views = register_flat(session, MANIFEST)
        norms = session.add_norms(group, (2,))
        if session.rank == 0:
            begin(session, group, views)
            norms.wait()
            return
        group.begin_step()
        for tensor in (3, 2, 1):
            group.notify_ready(tensor)
        assert told.wait(60)
        group.notify_ready(0)

    def on_warning(line: str) -> bool:
        if "for the norms of the averages of step 0" in line and "rank 1 has not sent 'front'" in line:
            told.set()
        return True

    caplog.handler.addFilter(lambda record: on_warning(record.getMessage()))
    ranks(2, main, SMALL, warn_after_seconds=0.2)
    assert told.is_set()
