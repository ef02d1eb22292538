"""The line that every job begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.scheduler import SchedulerConfig
from commsched.core.world import World, detect_world
from commsched.session.opening import FirstLine, alone_line, first_line, no_rank_line
from commsched.settings import Settings

MANIFEST = Manifest(tuple(TensorSpec(f"layer{i}", (1000, 500), "float32") for i in range(3)))
ONE = Manifest((TensorSpec("weight", (20,), "float64"),))


@pytest.mark.parametrize(
    ("settings", "transport", "ordered", "manifest", "line"),
    [
        (
            {},
            "ps",
            False,
            MANIFEST,
            "ps over tcp, 3 tensors of 6.0 MB per step, partition 4.0 MB at first, credit 16.0 MB at first, priority",
        ),
        (
            {"lane": "grpc", "servers": ("a:1",), "wire": "bfloat16", "credit": 16_000_000},
            "ps",
            False,
            MANIFEST,
            "ps over grpc with 1 server, 3 tensors of 6.0 MB per step, partition 4.0 MB at first, credit 16.0 MB, priority, "
            "bfloat16 on the wire",
        ),
        (
            {"order": "static", "collective": "rsag", "partition": 64_000, "credit": 16_000_000},
            "gloo",
            True,
            ONE,
            "gloo, 1 tensor of 160 bytes per step, partition 64 KB, credit 16.0 MB, priority, rsag, static order",
        ),
    ],
)
def test_it_says_what_decides_on_speed_and_result(
    settings: dict[str, Any], transport: str, ordered: bool, manifest: Manifest, line: str
) -> None:
    given = replace(Settings(), **settings)
    assert first_line(given, transport, ordered, 4, 2, given.scheduler, manifest) == f"4 ranks on 2 hosts, {line}"


def test_the_configuration_is_that_in_use() -> None:
    """Which a tuner may have changed, or may be that of a tuned file."""
    settings = Settings(partition=4_000_000, credit=16_000_000)
    line = first_line(settings, "ps", False, 2, 1, SchedulerConfig(partition_bytes=1_500_000, policy="fifo"), ONE)
    assert line.startswith("2 ranks on 1 host, ps over tcp, ")
    assert line.endswith(", partition 1.5 MB, credit 16.0 MB, fifo")


def test_it_is_said_once() -> None:
    said: list[str] = []
    first = FirstLine(said.append, lambda manifest: [f"{len(manifest.tensors)} tensors", "and more"])
    first.on_register(1, MANIFEST)
    first.on_register(2, ONE)
    assert said == ["3 tensors", "and more"]


@pytest.mark.parametrize(
    ("environ", "more"),
    [
        ({}, ""),
        ({"PMI_SIZE": "1"}, ""),
        ({"PMI_SIZE": "2"}, " (PMI_SIZE=2, but no launcher that commsched knows gave this process a rank)"),
        ({"SLURM_NTASKS": "8"}, " (SLURM_NTASKS=8, but no launcher that commsched knows gave this process a rank)"),
    ],
)
def test_a_process_that_is_alone_says_that_nothing_is_averaged(environ: dict[str, str], more: str) -> None:
    line = "1 process, so nothing is averaged; start more with commsched run -n N -- COMMAND, torchrun, mpirun or srun"
    assert alone_line(environ) == line + more


def test_a_launcher_that_does_not_set_what_scripts_share_their_data_by_is_named() -> None:
    mpi = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    line = no_rank_line(detect_world(mpi), mpi)
    assert line is not None
    assert line.startswith(
        "mpiexec (MPICH) sets no RANK and WORLD_SIZE: a script that shares out its data by them reads the same"
    )
    assert no_rank_line(detect_world(mpi), {**mpi, "RANK": "0"}) is None
    torchrun = {"RANK": "0", "WORLD_SIZE": "2"}
    assert no_rank_line(detect_world(torchrun), torchrun) is None
    assert no_rank_line(World(0, 2, 0, 2, "Lightning"), {}) is None
