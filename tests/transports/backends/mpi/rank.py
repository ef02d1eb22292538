"""One rank of a job under mpiexec: rank.py WHAT [ARGUMENT]. See the functions."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import commsched
from commsched.core.errors import UnsupportedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.scheduler import COLLECTIVES, SchedulerConfig
from commsched.core.world import detect_world
from commsched.session.opening import open_session
from commsched.session.session import Session
from commsched.settings import Settings
from commsched.testing import SimulatedDevice
from commsched.testing.check_transport import check_averages, check_job, check_large_tensors, check_random_rounds
from commsched.testing.checked_world import CheckedJob, OpenSession
from commsched.transports.hierarchy import messages
from tests.jobs.rank import say
from tests.transports.training import rank_main, train_alone


def checked(check: Callable[[OpenSession, int], None]) -> None:
    """``check`` this job, with a session for each check."""
    world = detect_world(os.environ)
    sessions = itertools.count()

    def open_one(config: SchedulerConfig) -> Session:
        keywords = {
            "partition": config.partition_bytes,
            "credit": config.credit_bytes,
            "policy": config.policy,
            "collective": "rsag" if config.collective == "rsag" else "auto",  # which lets norms be told
            "fusion": config.fusion_bytes,
            "order": config.order,
            "rendezvous": f"{os.environ['COMMSCHED_RENDEZVOUS']}.{next(sessions)}",
        }
        return open_session(world, Settings.load(keywords, os.environ))

    check(open_one, world.world_size)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("commsched")]
    assert left == [], left
    say(1, f"rank {world.rank} passed")


def check(rounds: str) -> None:
    """Everything a transport must do."""
    checked(partial(check_job, rounds=int(rounds)))


def check_on_device(rounds: str) -> None:
    """Averages of tensors on a simulated device. What else a transport must do with them is the same over any channel:
    ``tests/transports/test_staging.py``."""

    def check_averages_and_rounds(open_one: OpenSession, ranks: int) -> None:
        open_ranks = partial(CheckedJob, open_one, ranks, lambda rank: SimulatedDevice(seed=rank, number=rank))
        for collective in COLLECTIVES:
            check_averages(open_ranks, collective)
            check_random_rounds(open_ranks, int(rounds), collective)
        if ranks == 2:
            check_large_tensors(open_ranks)

    checked(check_averages_and_rounds)


def check_on_devices_of_hosts(rounds: str) -> None:
    """The same with ranks that believe to be on several hosts, two on each, and share memory there."""
    messages.PINNED_FROM_BYTES = 0
    rank = detect_world(os.environ).rank
    os.environ |= {"COMMSCHED_HIERARCHY": "on", "COMMSCHED_HOST": f"127.0.0.{rank // 2 + 1}"}
    check_on_device(rounds)


def random_rounds(rounds: str) -> None:
    checked(lambda open_one, ranks: check_random_rounds(lambda: CheckedJob(open_one, ranks), int(rounds)))


def train() -> None:
    """Two trainings, one after the other, each in a session of its own."""
    for kind in COLLECTIVES:
        rendezvous = f"{os.environ['COMMSCHED_RENDEZVOUS']}.{kind}"
        with commsched.init(collective=kind, rendezvous=rendezvous, partition="600", credit="1200") as session:
            weights = rank_main(session, {})
            assert session.gather(weights) == [weights] * session.world_size
        np.testing.assert_allclose(weights, train_alone(session.world_size), rtol=0, atol=1e-12)
    say(1, f"rank {session.rank} passed")


def fall_back() -> None:
    """The first transport refuses, on all ranks, after MPI was initialised; the program goes on with another."""
    try:
        commsched.init(collective="rsag", hierarchy="on")
    except UnsupportedError:
        averaging = Averaging(transport="ps")
    averaging.step()
    commsched.shutdown()
    say(1, f"rank {averaging.session.rank} passed")


class Averaging:
    """A session in which tensors are averaged for ever."""

    def __init__(self, **settings: str) -> None:
        self.session = commsched.init(**settings)
        self._buffer = np.zeros(4_000_000, np.uint8)
        manifest = Manifest((TensorSpec("weight", (1_000_000,), "float32"),))
        self._group = self.session.register(manifest, {"float32": self._buffer.data})

    def step(self) -> None:
        self._group.begin_step()
        self._buffer.view(np.float32).fill(self.session.rank)
        self._group.notify_ready(0)
        self._group.proxies[0].wait()
        assert (self._buffer.view(np.float32) == (self.session.world_size - 1) / 2).all()

    def announce(self) -> None:
        """Say who this process is, once everything works."""
        self.step()
        say(1, f"rank {self.session.rank} pid {os.getpid()}")


def average_for_ever() -> None:
    averaging = Averaging()
    averaging.announce()
    while True:
        averaging.step()


def raise_on_rank_1() -> None:
    """The others are in the middle of averages."""
    averaging = Averaging()
    averaging.announce()
    for _ in range(3):
        averaging.step()
    if averaging.session.rank == 1:
        raise ValueError("no more data")
    while True:
        averaging.step()


def raise_beside_a_barrier() -> None:
    """The others wait in a call of MPI's that is not ours, and that nothing of Python ends."""
    averaging = Averaging()
    averaging.announce()
    from mpi4py import MPI

    if averaging.session.rank == 1:
        raise ValueError("no more data")
    MPI.COMM_WORLD.Barrier()


def stop_before_the_end() -> None:
    """Rank 1 stands still; the others are done, and wait for it as the interpreter ends."""
    averaging = Averaging()
    averaging.announce()
    if averaging.session.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def use_mpi_beside() -> None:
    """The program's own collectives go on at the same time as ours."""
    averaging = Averaging()
    from mpi4py import MPI

    total = np.zeros(1)
    for step in range(50):
        average = threading.Thread(target=averaging.step)
        average.start()
        MPI.COMM_WORLD.Allreduce(np.full(1, step, float), total)
        assert total[0] == step * MPI.COMM_WORLD.size
        average.join()
    commsched.shutdown()
    say(1, f"rank {MPI.COMM_WORLD.rank} passed")


def idle(seconds: str) -> None:
    """Print the CPU time of this process, per second, while nothing is to be sent."""
    averaging = Averaging()
    averaging.step()
    before = time.process_time()
    time.sleep(float(seconds))
    say(1, f"rank {averaging.session.rank} used {(time.process_time() - before) / float(seconds):.4f} of a core")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    globals()[sys.argv[1]](*sys.argv[2:])
