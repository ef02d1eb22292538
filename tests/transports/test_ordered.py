"""Collectives without identity, in memory: what agreement makes of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from commsched.core.errors import OrderMismatch
from commsched.core.interfaces import OnFailure, Transport
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.scheduler import SchedulerConfig
from commsched.session.events import SessionListener
from commsched.testing.check_transport import _Tensors, check_transport
from commsched.testing.checked_world import CheckedWorld, Threads

from .worlds import ordered_world


def test_conformance() -> None:
    check_transport(ordered_world, rounds=60)


def train(world: CheckedWorld, rank: int, order: str, averages: list[bool]) -> None:
    manifest = Manifest(tuple(TensorSpec(f"layer{i}", (300,), "float32") for i in range(6)))
    with world.core(rank, SchedulerConfig(1200, 10**6, order=order)) as core:
        tensors = _Tensors(core, manifest, world, rank)
        for _ in range(20):
            tensors.average(rank, range(5, -1, -1))
            averages.append(True)


def test_two_ranks_that_disagree_end_in_an_error_that_names_both_tensors_and_never_in_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What rank 1 hears is changed on the way, so that it would launch two tensors of one shape in another order."""
    announced, pass_on = 0, SessionListener.on_announced

    def swap(listener: SessionListener, topic: str, message: Any) -> None:
        nonlocal announced
        announced += 1
        if "launch" in message and announced > 8 and len(message["launch"]) > 1:
            message["launch"] = message["launch"][::-1]
        elif "launch" in message and announced > 8:
            group, step, partition, verb = message["launch"][0]
            message["launch"] = [[group, step, (partition + 1) % 6, verb]]
        pass_on(listener, topic, message)

    monkeypatch.setattr(SessionListener, "on_announced", swap)
    averages: list[bool] = []
    expected = r"rank 1 launched tensor 'layer\d' \(partition \d of step \d+, \w+\) where rank 0 launched tensor 'layer\d' \("
    with Threads(ordered_world, 2) as world:
        world.failures_expected = True
        with pytest.raises(OrderMismatch, match=expected):
            world.run(partial(train, order="agreed", averages=averages))
    assert averages, "the first steps were right"


def test_launching_out_of_order_gives_wrong_numbers_without_agreement() -> None:
    """What the agreement is for: these collectives cannot see it themselves."""

    @contextmanager
    def unordered(listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
        with ordered_world(listeners) as transports:
            for transport in transports:
                transport.ordered = False
            yield transports

    def body(world: CheckedWorld, rank: int) -> None:
        manifest = Manifest(tuple(TensorSpec(f"layer{i}", (300,), "float32") for i in range(2)))
        with world.core(rank, SchedulerConfig(1200, 10**6, "fifo")) as core:
            try:
                _Tensors(core, manifest, world, rank).average(rank, [0, 1] if rank == 0 else [1, 0])
            finally:
                both.wait(60)  # the other one may still wait for a collective of this one

    both = threading.Barrier(2)
    with Threads(unordered, 2) as world, pytest.raises(AssertionError, match="got a wrong average"):
        world.run(body)
