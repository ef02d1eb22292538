"""Norms of averages over transports: beyond what every conformance check has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from commsched.core.core import Core
from commsched.core.errors import TransportError
from commsched.core.group import TensorGroup
from commsched.core.interfaces import OnFailure, Transport
from commsched.core.manifest import Manifest, TensorSpec
from commsched.testing import checked_world
from commsched.testing.check_transport import check_norms
from commsched.testing.checked_world import Meeting, OpenWorld, Threads
from commsched.transports.collective import CollectiveTransport
from commsched.transports.collective.transport import EXCHANGE_UP_TO
from commsched.transports.wire import WireTransport

from .collective.memory import Network
from .worlds import embedded_world, gloo_world, local_world, separate_world


class TooEarly(Core):
    """A mutation: it asks for the rows of a step when the step begins."""

    def begin_step(self, group: TensorGroup) -> int:
        step = super().begin_step(group)
        with self._lock:
            if group.norms:
                group.unmeasured = -1
                self._norms_ready(group, 0.0)
        return step


@pytest.mark.parametrize(
    "open_world", [local_world, embedded_world, separate_world, gloo_world], ids=["local", "embedded", "separate", "gloo"]
)
def test_rows_that_are_asked_for_too_early_are_an_error_and_no_wrong_norm(
    open_world: OpenWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_world, "Core", TooEarly)
    with pytest.raises(TransportError, match=r"the norm of 'a-float32-1' of step 1 covers 0 of 1 elements"):
        check_norms(partial(Threads, open_world, 2))


@pytest.mark.parametrize("inner", [embedded_world, gloo_world], ids=["ps", "gloo"])
def test_norms_are_those_of_what_travels_in_16_bits(inner: OpenWorld) -> None:
    @contextmanager
    def open_world(listeners: Sequence[OnFailure]) -> Iterator[Sequence[Transport]]:
        with inner(listeners) as transports:
            yield [WireTransport(transport, "bfloat16") for transport in transports]

    check_norms(partial(Threads, open_world, 3))


@pytest.mark.parametrize(
    ("collective", "world_size", "rows"),
    [
        ("auto", 2, 2),
        ("auto", EXCHANGE_UP_TO, EXCHANGE_UP_TO),
        ("auto", EXCHANGE_UP_TO + 1, 0),
        ("rsag", EXCHANGE_UP_TO + 1, EXCHANGE_UP_TO + 1),
        ("all_reduce", 2, 0),
    ],
)
def test_collectives_tell_norms_where_they_may_be_split(collective: str, world_size: int, rows: int) -> None:
    context = Meeting(world_size).context(0, pytest.fail, collective=collective)
    transport = CollectiveTransport(context, [Network(world_size).channel(0)])
    assert transport.norm_rows(Manifest((TensorSpec("x", (4,), "float16"),))) == rows
    transport.close()
