import pytest

from commsched.simulator.clock import VirtualClock


def test_virtual_time_jumps_from_event_to_event() -> None:
    clock, seen = VirtualClock(), list[tuple[float, str]]()

    def note(name: str) -> None:
        seen.append((clock.now, name))

    clock.call_at(5.0, lambda: note("late"))
    clock.call_at(2.0, lambda: (note("early"), clock.call_at(3.0, lambda: note("asked for by an event"))))
    clock.call_at(5.0, lambda: note("as late, asked for later"))
    clock.run()
    assert seen == [(2.0, "early"), (3.0, "asked for by an event"), (5.0, "late"), (5.0, "as late, asked for later")]
    assert clock.now == 5.0


def test_virtual_time_does_not_run_backwards() -> None:
    clock = VirtualClock()
    clock.call_at(2.0, lambda: None)
    clock.run()
    with pytest.raises(ValueError, match=r"^an event at 1.0 s was asked for at 2.0 s$"):
        clock.call_at(1.0, lambda: None)
