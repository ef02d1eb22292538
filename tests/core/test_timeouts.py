"""Each part of a failing job waits longer than the parts that know more."""

from __future__ import annotations

from commsched.core import timeouts


def test_the_periods_grow_in_the_order_in_which_parts_act() -> None:
    knowing = (timeouts.VERDICT_SECONDS, timeouts.BACKEND_FAILURE_SECONDS, timeouts.STUCK_LIBRARY_SECONDS)
    assert min(knowing) > timeouts.CONSEQUENCE_SECONDS
    assert max(knowing) < timeouts.RAISE_SECONDS
    assert timeouts.FAREWELL_SECONDS >= timeouts.VERDICT_SECONDS
    assert timeouts.MPI_ABORT_SECONDS >= timeouts.VERDICT_SECONDS
    assert timeouts.LAUNCHER_SECONDS > timeouts.RAISE_SECONDS + timeouts.CONSEQUENCE_SECONDS
