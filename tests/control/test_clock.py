from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.control.clock import ClockOffset

delays = st.floats(0.0, 1.0)


@given(st.floats(-1e4, 1e4), st.lists(st.tuples(delays, delays), min_size=1, max_size=8))
def test_the_error_is_at_most_half_of_the_fastest_round_trip(offset: float, ways: list[tuple[float, float]]) -> None:
    clock, now = ClockOffset(), 100.0
    for there, back in ways:
        clock.add(now, now + there + offset, now + there + back)
        now += 10
    fastest = min(there + back for there, back in ways)
    assert abs(clock.seconds - offset) <= fastest / 2 + 1e-9
    assert clock.round_trips == len(ways)


def test_the_fastest_round_trip_wins() -> None:
    clock = ClockOffset()
    clock.add(0.0, 57.0, 10.0)
    clock.add(20.0, 70.5, 21.0)
    clock.add(30.0, 83.0, 39.0)
    assert clock.seconds == pytest.approx(50.0)
