"""What the control channel tells a session, whatever of it is there yet."""

from __future__ import annotations

from typing import Any

import pytest

from commsched.core.config import SchedulerConfig
from commsched.core.core import Core
from commsched.core.errors import CommschedError, PeerLost, TransportError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.session.events import SessionListener
from commsched.testing.fakes import RecordingTransport

MANIFEST = Manifest((TensorSpec("weight", (2,), "uint8"),))
FIRST, SECOND = PeerLost("the first"), TransportError("the second")


class Heard:
    """A tuner; what it was told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_switch(self, window: Any, steps: Any) -> None:
        self.calls.append((window, steps))

    def on_message(self, rank: int, value: Any) -> None:
        self.calls.append((rank, value))

    def on_leave(self, rank: int) -> None:
        self.calls.append(rank)

    def close(self, wait: bool) -> None: ...


def test_what_comes_before_the_core_reaches_it_in_order_and_once() -> None:
    listener, transport = SessionListener(lambda rank, value: None), RecordingTransport()
    core = Core(transport, SchedulerConfig())
    assert listener.hold_steps() == {}
    for number in (1, 2):
        listener.switch_at(SchedulerConfig(number, number).to_record(), {})
        listener.on_leave(number)
    assert (transport.left, core.config) == ([], SchedulerConfig())
    listener.use(core)
    assert (transport.left, core.config) == ([1, 2], SchedulerConfig(2, 2))
    listener.on_leave(3)
    assert transport.left == [1, 2, 3]
    core.close()


def test_steps_that_are_held_before_there_is_a_core_are_held_by_it() -> None:
    """Else a group that is added before the change is agreed on might begin a step that this rank has promised not to begin."""
    listener, core = SessionListener(lambda rank, value: None), Core(RecordingTransport(), SchedulerConfig(1, 1))
    assert listener.hold_steps() == {}
    listener.use(core)
    group = core.add_group(cut(MANIFEST, 1), {"uint8": memoryview(bytearray(2))})
    assert core._is_held(group) is False
    group.begin_step()
    assert core._is_held(group) is True
    listener.switch_at(SchedulerConfig(2, 2).to_record(), {0: 1})
    assert core._is_held(group) is False
    core.close()


def test_a_tuner_hears_of_steps_of_groups_that_are_not_released_here() -> None:
    """Its window on a group without further steps would never be full."""
    listener, core, tuner = SessionListener(lambda rank, value: None), Core(RecordingTransport(), SchedulerConfig()), Heard()
    listener.use(core)
    listener.tuner = tuner
    core.add_group(cut(MANIFEST, 2), {"uint8": memoryview(bytearray(2))}).release()
    core.add_group(cut(MANIFEST, 2), {"uint8": memoryview(bytearray(2))})
    listener.switch_at({**SchedulerConfig().to_record(), "window": "w"}, {0: 3, 1: 4, 2: 1})
    assert tuner.calls == [("w", {1: 4, 2: 1})]
    core.close()


@pytest.mark.parametrize("core_first", [True, False])
def test_the_first_failure_fails_the_core_and_is_told_once(core_first: bool) -> None:
    listener, core = SessionListener(lambda rank, value: None), Core(RecordingTransport(), SchedulerConfig())
    told: list[CommschedError] = []
    listener.when_failed(told.append)
    if core_first:
        listener.use(core)
    listener.on_failure(FIRST)
    listener.on_failure(SECOND)
    assert told == [FIRST]
    listener.when_failed(told.append)  # who asks late is told at once
    assert told == [FIRST, FIRST]
    if not core_first:
        listener.use(core)
    with pytest.raises(PeerLost, match="the first"):
        core.check()
    assert listener.failure is FIRST
    core.close()


def test_what_concerns_the_tuner_goes_to_it() -> None:
    listener, core, tuner = SessionListener(lambda rank, value: None), Core(RecordingTransport(), SchedulerConfig()), Heard()
    listener.use(core)
    other = SchedulerConfig(8, 8)
    listener.on_message(1, {"tuner": "nobody listens"})
    listener.tuner = tuner
    listener.switch_at({**other.to_record(), "window": "w"}, {})
    listener.switch_at(other.to_record(), {0: 7})  # not to be measured
    listener.on_message(1, {"tuner": 5})
    listener.on_leave(1)
    assert tuner.calls == [("w", {}), (1, 5), 1]
    assert core.config == other
    core.close()
