"""Steps that are broken off, over real Cores: a static order ends as an agreed one does, and never in a wait without end."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from commsched.core.core import Core
from commsched.core.errors import PeerLost
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.order.static import STABLE_STEPS
from commsched.core.scheduler import SchedulerConfig
from commsched.testing.check_transport import _Tensors
from commsched.testing.checked_world import CheckedWorld, Threads
from tests.transports.hierarchy.worlds import OrderedNetwork, hierarchy
from tests.transports.worlds import ordered_world

MANIFEST = Manifest(tuple(TensorSpec(f"layer{i}", (300,), "float32") for i in range(6)))
CONFIG = SchedulerConfig(1200, 2400)


def trained(core: Core, world: CheckedWorld, rank: int) -> _Tensors:
    """After so many steps that a static order is frozen on all ranks, if it may be."""
    tensors = _Tensors(core, MANIFEST, world, rank)
    for _ in range(STABLE_STEPS + 3):
        tensors.average(rank, range(5, -1, -1))
    # A rank that is led contributes to steps of a static order before it hears of that order.
    while core.config.order == "static" and not all(world.gather(rank, core.is_static)):
        tensors.average(rank, range(5, -1, -1))
    return tensors


#: Ranks that are alone, and hosts of two ranks, whose first launches for both.
WORLDS = {"alone": ordered_world, "in pairs": hierarchy(lambda rank: rank // 2, OrderedNetwork)}


@pytest.mark.parametrize("order", ["agreed", "static"])
@pytest.mark.parametrize("ready", [[5, 4], [0, 1], [5, 0, 3]])
@pytest.mark.parametrize("world", WORLDS)
def test_a_last_step_that_all_break_off_is_no_hindrance_to_closing(order: str, ready: list[int], world: str) -> None:
    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, replace(CONFIG, order=order)) as core:
            tensors = trained(core, world, rank)
            assert core.is_static == (order == "static")
            tensors.begin(rank, ready)
            core.drain()
            core.prepare_leave()

    with Threads(WORLDS[world], 4, 60.0) as threads:
        threads.run(body)


@pytest.mark.parametrize("order", ["agreed", "static"])
@pytest.mark.parametrize("notified", [0, 1, 3])
@pytest.mark.parametrize(("world", "quitter"), [("alone", 1), ("in pairs", 1), ("in pairs", 2), ("in pairs", 3)])
def test_who_waits_for_what_one_rank_has_broken_off_is_told_so(order: str, notified: int, world: str, quitter: int) -> None:
    closed = threading.Event()

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, replace(CONFIG, order=order)) as core:
            tensors = trained(core, world, rank)
            world.gather(rank, None)  # a leader may end the job as soon as a rank of its host has left
            if rank == quitter:
                tensors.begin(rank, range(5, 5 - notified, -1))
                core.drain()
                core.prepare_leave()
                closed.set()
                return

            def go_on() -> None:
                tensors.begin(rank, range(5, -1, -1))
                assert closed.wait(60)
                core.leave(quitter)
                tensors.compare(rank)

            with pytest.raises(PeerLost, match=rf"rank {quitter} left.* tensor 'layer\d' .*step \d+.* waits"):
                go_on()

    with Threads(WORLDS[world], 2 if world == "alone" else 4, 60.0) as threads:
        threads.failures_expected = True
        threads.run(body)


def test_who_waits_for_a_static_order_already_is_told_at_once() -> None:
    """The wait does not last until the next warning is due."""
    waits = threading.Event()

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, replace(CONFIG, order="static")) as core:
            core.warn_after_seconds = 1000.0
            tensors = trained(core, world, rank)
            world.gather(rank, None)
            if rank == 1:
                assert waits.wait(60)
                with core._lock:  # the other thread waits, and does not only begin to
                    pass
                core.drain()
                with suppress(PeerLost):  # the other rank may find it, and the job fail, before this call returns
                    core.prepare_leave()
                return
            wait = core._progress.wait

            def announced_wait(timeout: float | None = None) -> bool:
                waits.set()
                return wait(timeout)

            core._progress.wait = announced_wait  # type: ignore[method-assign]
            tensors.begin(rank, range(5, -1, -1))
            with pytest.raises(PeerLost, match=r"rank 1 left.* tensor 'layer\d' .*step \d+.* waits"):
                tensors.compare(rank)

    with Threads(ordered_world, 2, 60.0) as threads:
        threads.failures_expected = True
        threads.run(body)


def test_a_change_that_is_wanted_by_a_static_order_does_not_undo_another() -> None:
    wanted = SchedulerConfig(1200, 4800)

    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, replace(CONFIG, order="static")) as core:
            tensors = trained(core, world, rank)
            for step in range(3 * STABLE_STEPS):
                if rank == 0 and step == STABLE_STEPS - 1:
                    core._messenger.propose(wanted.to_record())
                tensors.average(rank, range(6))  # not the usual order
            assert core.config == wanted

    with Threads(ordered_world, 2, 60.0) as world:
        world.run(body)


def test_a_group_that_rests_keeps_one_change_in_waiting() -> None:
    def body(world: CheckedWorld, rank: int) -> None:
        with world.core(rank, CONFIG) as core:
            tensors, resting = _Tensors(core, MANIFEST, world, rank), _Tensors(core, MANIFEST, world, rank)
            for step in range(1, 9):
                tensors.average(rank, range(6))
                core.switch_at(SchedulerConfig(100 * step, 1000), {tensors.group.index: step, resting.group.index: 1})
            assert len(core._changes.waiting) <= 2
            resting.average(rank, range(6))
            resting.average(rank, range(6))
            assert resting.group.plan.partitions[0].nbytes <= 800

    with Threads(ordered_world, 2, 60.0) as world:
        world.run(body)
