"""What the control channel tells a session."""

from __future__ import annotations

from typing import Any

from commsched.core.core import Core
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.session.events import TUNER, SessionListener
from tests.recording_transport import RecordingTransport

MANIFEST = Manifest((TensorSpec("weight", (2,), "uint8"),))


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


def test_a_tuner_hears_of_steps_of_groups_that_are_not_released_here() -> None:
    """Its window on a group without further steps would never be full."""
    core, tuner = Core(RecordingTransport(), SchedulerConfig()), Heard()
    listener = SessionListener(core, lambda rank, value: None)
    listener.tuner = tuner
    core.add_group(cut(MANIFEST, 2), {"uint8": memoryview(bytearray(2))}).release()
    core.add_group(cut(MANIFEST, 2), {"uint8": memoryview(bytearray(2))})
    listener.switch_at(SchedulerConfig().to_record(), {0: 3, 1: 4, 2: 1}, {"trial": 7})
    assert tuner.calls == [({"trial": 7}, {1: 4, 2: 1})]
    core.close()


def test_what_concerns_the_tuner_goes_to_it() -> None:
    core, tuner = Core(RecordingTransport(), SchedulerConfig()), Heard()
    listener = SessionListener(core, lambda rank, value: None)
    other = SchedulerConfig(8, 8)
    listener.on_message(1, TUNER, "nobody listens")
    listener.tuner = tuner
    listener.switch_at(other.to_record(), {}, {"trial": 7})
    listener.switch_at(other.to_record(), {0: 7}, {})  # not to be measured
    listener.on_message(1, TUNER, 5)
    listener.on_leave(1)
    assert tuner.calls == [({"trial": 7}, {}), (1, 5), 1]
    assert core.config == other
    core.close()
