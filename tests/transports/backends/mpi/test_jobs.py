"""The whole transport, in real ranks under mpiexec, over both MPIs."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.jobs.job import gone

from .launch import BOTH, MPICH, OPEN_MPI, Mpi, MpiJob, run

RANK = ("-m", "tests.transports.backends.mpi.rank")


@pytest.mark.parametrize(("mpi", "ranks"), [(MPICH, 1), (MPICH, 3), (OPEN_MPI, 2)], ids=str)
def test_it_does_what_every_transport_must(mpi: Mpi, ranks: int) -> None:
    code, out, err = run(mpi, ranks, *RANK, "check", "10")
    assert code == 0, err
    assert sorted(out.split("\n")) == ["", *(f"rank {rank} passed" for rank in range(ranks))]


def test_it_averages_the_memory_of_a_device() -> None:
    """Between two ranks: to MPI it is memory of the host."""
    code, out, err = run(MPICH, 2, *RANK, "check_on_device", "6")
    assert code == 0, err
    assert out.count("passed") == 2


def test_it_averages_what_the_devices_of_a_host_sum_in_shared_memory() -> None:
    code, out, err = run(MPICH, 4, *RANK, "check_on_devices_of_hosts", "4")
    assert code == 0, err
    assert out.count("passed") == 4


def test_random_rounds_end_and_are_exact() -> None:
    code, out, err = run(MPICH, 2, *RANK, "random_rounds", "80")
    assert code == 0, err
    assert out.count("passed") == 2


def test_training_equals_that_of_one_process() -> None:
    code, out, err = run(MPICH, 3, *RANK, "train")
    assert code == 0, err
    assert out.count("passed") == 3


@BOTH
def test_the_program_may_use_mpi_beside_it(mpi: Mpi) -> None:
    code, out, err = run(mpi, 2, *RANK, "use_mpi_beside")
    assert code == 0, err
    assert out.count("passed") == 2


@BOTH
def test_a_job_that_falls_back_to_another_transport_ends_well(mpi: Mpi) -> None:
    code, out, err = run(mpi, 2, *RANK, "fall_back")
    assert code == 0, err
    assert out.count("passed") == 2


# --- how jobs end that fail ---


@BOTH
def test_an_exception_on_one_rank_ends_all(mpi: Mpi) -> None:
    code, _, err = run(mpi, 3, *RANK, "raise_on_rank_1")
    assert code == 1
    assert "ValueError: no more data" in err
    assert err.count("TransportError: rank 1 ended: ValueError: no more data") == 2


@BOTH
def test_an_exception_ends_ranks_that_wait_in_mpi(mpi: Mpi) -> None:
    code, _, err = run(mpi, 3, *RANK, "raise_beside_a_barrier")
    assert code == 1
    assert "ValueError: no more data" in err


def pids(job: MpiJob, ranks: int) -> list[int]:
    """The process of each rank, once all are in the middle of averages."""
    found = dict(re.findall(r"rank (\d+) pid (\d+)", "\n".join(job.lines(ranks))))
    return [int(found[str(rank)]) for rank in range(ranks)]


@BOTH
def test_a_rank_that_is_killed_ends_all(mpi: Mpi) -> None:
    with MpiJob(mpi, 3, *RANK, "average_for_ever") as job:
        processes = pids(job, 3)
        os.kill(processes[1], signal.SIGKILL)
        code, _, _ = job.end()
    assert code != 0  # MPICH's mpiexec ends the others before they can say why
    assert all(gone(pid) for pid in processes)


@BOTH
def test_a_rank_that_is_stopped_is_named_and_ends_all(mpi: Mpi) -> None:
    with MpiJob(mpi, 3, *RANK, "average_for_ever", COMMSCHED_FAIL_AFTER="2") as job:
        processes = pids(job, 3)
        os.kill(processes[1], signal.SIGSTOP)
        code, _, err = job.end()
    assert code == 1
    said = len(re.findall(rf"PeerTimeout: rank 1 \(.*pid {processes[1]}\) has been silent for", err))
    assert said >= 2  # rank 1 hears of it too if the launcher wakes it before it ends it
    assert all(gone(pid) for pid in processes)


@BOTH
def test_a_rank_that_is_stopped_at_the_end_ends_all(mpi: Mpi) -> None:
    with MpiJob(mpi, 3, *RANK, "stop_before_the_end", COMMSCHED_FAIL_AFTER="2") as job:
        processes = pids(job, 3)
        code, _, err = job.end()
    assert code == 1
    assert len(re.findall(r"rank [02]: PeerTimeout: rank 1 .* has been silent for", err)) == 2
    assert all(gone(pid) for pid in processes)


# --- how jobs do not start ---


def test_ranks_of_another_launcher_are_told_how_to_start(tmp_path: Path) -> None:
    meet = {"COMMSCHED_RENDEZVOUS": str(tmp_path / "control.json"), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    places = [{**meet, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    with MpiJob(MPICH, 1, *RANK, "average_for_ever", **places[0]) as first:
        with MpiJob(MPICH, 1, *RANK, "average_for_ever", **places[1]) as second:
            ends = [first.end(), second.end()]
    for rank, (code, _, err) in enumerate(ends):
        assert code != 0
        assert f"did not start these 2 ranks as one job: rank {rank} is rank 0 of 1 to it (launcher: torchrun)" in err
        assert "mpiexec -n 2 python train.py" in err


def test_thread_levels_below_multiple_are_refused() -> None:
    script = "import mpi4py; mpi4py.rc.thread_level = 'serialized'; import commsched; commsched.init()"
    code, _, err = run(MPICH, 2, "-c", script)
    assert code == 1
    assert (
        "ConfigError: transport='mpi' needs MPI with thread level 'multiple', but it was initialised with 'serialized'" in err
    )


def test_mpi_that_is_not_initialised_is_refused() -> None:
    script = "import mpi4py; mpi4py.rc.initialize = False; import commsched; commsched.init()"
    code, _, err = run(MPICH, 2, "-c", script)
    assert code == 1
    assert "call MPI.Init_thread(MPI.THREAD_MULTIPLE) before commsched.init" in err


def test_a_missing_mpi4py_is_named_with_its_install_line() -> None:
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'mpi4py' else f(n, *a)"
    code, _, err = run(MPICH, 2, "-c", f"{hide}; import commsched; commsched.init()")
    assert code == 1
    assert "ConfigError: transport='mpi' needs mpi4py, which rank 0 does not have: pip install \"commsched[mpi]\"" in err
