"""Sixteen ranks on one machine train, over each transport, to the same weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from bench.harness.job import Job, run_job
from commsched import SchedulerConfig
from commsched.control.end import ControlEnd
from commsched.core.interfaces import Transport
from commsched.session.local import local_sessions
from commsched.testing.checked_world import Meeting
from commsched.testing.world import run_world
from commsched.transports.backend import TransportContext
from commsched.transports.backends import ps
from tests import warm

from .training import Weights, rank_main, train_alone

RANKS = 16
STEPS = 3  # the second has momentum, and the third reads what it has updated
SETTINGS = {"partition": "2000", "credit": "4000", "join_within": "120", "fail_after": "40", "hierarchy": "off"}


def train_in_processes() -> Weights:
    """The weights over MPI, which are the same bits on all ranks."""
    job = Job(RANKS, settings={**SETTINGS, "transport": "mpi"}, timeout_seconds=300)
    with pytest.MonkeyPatch.context() as patch:
        warm.let_benchmarks_fork(patch, warm.NUMPY)
        by_rank: list[Weights] = run_job(job, "tests.transports.training", {"steps": STEPS}).by_rank
    return equal(by_rank)


def train_in_threads(open_rank: Callable[[TransportContext], Transport]) -> Weights:
    """The same over another transport: sixteen processes that import it take much longer."""
    meeting = Meeting(RANKS)

    def open_transport(rank: int, control: ControlEnd) -> Transport:
        return open_rank(meeting.context(rank, control.report, fail_after=60.0, join_within=60.0))

    def train_rank(rank: int) -> Weights:
        with sessions[rank] as session:
            return rank_main(session, {"steps": STEPS})

    sessions = local_sessions(RANKS, SchedulerConfig(2000, 4000), open_transport=open_transport)
    return equal(run_world(RANKS, train_rank, timeout_seconds=300.0))


def equal(by_rank: list[Weights]) -> Weights:
    for rank, weights in enumerate(by_rank):
        assert weights == by_rank[0], f"rank {rank} has other weights than rank 0"
    return by_rank[0]


@pytest.fixture(scope="module")
def by_servers() -> Weights:
    weights = train_in_threads(ps.open_transport)
    np.testing.assert_allclose(weights, train_alone(RANKS, STEPS), rtol=0, atol=1e-12)
    return weights


def test_mpi_gives_the_bits_of_the_parameter_server(by_servers: Weights) -> None:
    assert train_in_processes() == by_servers


def test_gloo_gives_the_bits_of_the_parameter_server(by_servers: Weights) -> None:
    pytest.importorskip("torch.distributed")
    from commsched.transports.backends import gloo

    assert train_in_threads(gloo.open_transport) == by_servers
