"""Every rank notices that the records of a step differ, and gets the means of its flags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.errors import RanksDiverged
from commsched.plugins.common.step_flags import StepFlags, _OnDevice, digest_of_record, digests_differ
from commsched.session.local import local_sessions
from commsched.session.session import Session
from commsched.testing import SimulatedDevice
from commsched.testing.world import run_world


def on_ranks(world_size: int, rank: Any) -> list[Any]:
    sessions = local_sessions(world_size)

    def run(index: int) -> Any:
        with sessions[index] as session:
            return rank(session, StepFlags(session, "flags", "numbers of the test", 3))

    try:
        return run_world(world_size, run, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def test_flags_come_back_as_their_means_in_each_step() -> None:
    def run(session: Session, flags: StepFlags) -> list[list[float]]:
        means = []
        for step in range(3):
            flags.offer({"rate": 0.1 / (step + 1)}, [session.rank == 0, step, session.rank])
            flags.require_same()
            assert flags.is_there
            means.append(flags.means())
        return means

    assert on_ranks(4, run) == [[[0.25, step, 1.5] for step in range(3)]] * 4


def test_before_the_first_offer_there_is_no_difference() -> None:
    on_ranks(2, lambda session, flags: flags.require_same())


def test_ranks_whose_records_differ_all_learn_the_first_value_that_does() -> None:
    def run(session: Session, flags: StepFlags) -> str:
        flags.offer({"rate": 0.1, "decay": 0.0}, [0, 0, 0])
        flags.require_same()
        flags.offer({"rate": 0.1, "decay": float(session.rank == 1)}, [0, 0, 0])
        with pytest.raises(RanksDiverged) as raised:
            flags.require_same()
        session.abort("as expected")
        return str(raised.value)

    said = "numbers of the test differ between ranks after step 1: 'decay' is 0.0 on ranks 0, 2 but 1.0 on rank 1"
    assert on_ranks(3, run) == [said] * 3


def test_a_flag_that_is_a_digest_shows_a_difference_on_every_rank() -> None:
    def run(session: Session, flags: StepFlags) -> list[bool]:
        flags.offer({}, [2**40 - 1, 12345 if session.rank == 2 else 2**39, 0])
        flags.wait()
        return [flags.differs(flag) for flag in range(3)]

    assert on_ranks(3, run) == [[False, True, False]] * 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
)


@given(json_values, st.integers(1, 8192))
def test_no_mean_of_equal_digests_is_rounded_so_much_that_they_seem_to_differ(record: Any, world_size: int) -> None:
    """Whether a transport divides the sum, or multiplies it or each digest."""
    digest = digest_of_record(record)
    assert 0 <= digest < 2**40
    assert digest * world_size / world_size == digest
    assert not digests_differ(digest, digest * world_size * (1 / world_size))
    assert not digests_differ(digest, sum([digest * (1 / world_size)] * world_size))


@given(json_values, json_values, st.integers(2, 8192))
def test_one_rank_that_differs_moves_the_mean_of_all(one: Any, other: Any, world_size: int) -> None:
    ours, theirs = digest_of_record(one), digest_of_record([other])
    mean = ((world_size - 1) * ours + theirs) / world_size
    if ours != theirs:
        assert digests_differ(ours, mean)
        assert digests_differ(theirs, mean)


def test_on_a_device_nothing_of_a_later_offer_is_taken_for_an_average() -> None:
    device = SimulatedDevice()
    flags, stream = _OnDevice(device, 8), device.stream()
    flags.values[:] = 1
    flags.to_device(0).synchronize()
    flags.values[:] = 2
    flags.to_device(1).synchronize()
    flags.to_host(0)  # of a thread that has waited for the averages of step 0, and comes late
    assert flags.values == [2]
    average = device.allocate_host(8)
    np.frombuffer(average, np.float64)[:] = 7
    stream.copy(flags.memory, average)
    stream.synchronize()
    flags.to_host(1)
    assert flags.values == [7]
