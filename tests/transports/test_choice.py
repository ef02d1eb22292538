"""What transport=auto chooses, and how it says so."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import product

import pytest

from commsched.core.world import World
from commsched.session.local import LocalControlWorld
from commsched.settings import Settings
from commsched.testing import SimulatedDevice, run_world
from commsched.transports import transport_names
from commsched.transports.open import Capabilities, choose, detect_capabilities, transport_name
from tests.devices.backends.fake_cupy import in_place_of_cupy

TORCHRUN = World(0, 4, 0, 4, "torchrun")
MPICH = World(0, 4, 0, 4, "mpiexec (MPICH)")
OPENMPI = World(0, 4, 0, 4, "mpirun (Open MPI)")
EIGHT_HOSTS = World(0, 8, 0, 1, "torchrun")
SERVERS = {"servers": ("10.0.0.7:1", "10.0.0.8:1")}
EVERYTHING = Capabilities(cuda_tensors=True, nccl=True, gloo=True, mpi4py=True)


@pytest.mark.parametrize(
    ("settings", "world", "seen", "line"),
    [
        ({}, TORCHRUN, Capabilities(), "ps (every rank hosts a shard; no servers are named)"),
        ({}, TORCHRUN, Capabilities(mpi4py=True, gloo=True), "ps (every rank hosts a shard; no servers are named)"),
        ({}, EIGHT_HOSTS, Capabilities(gloo=True), "gloo (8 ranks on the network)"),
        ({}, World(0, 32, 0, 4), Capabilities(gloo=True), "gloo (8 ranks on the network)"),
        ({}, World(0, 16, 0, 8), Capabilities(gloo=True), "ps (every rank hosts a shard; no servers are named)"),
        ({"hierarchy": "off"}, World(0, 16, 0, 8), Capabilities(gloo=True), "gloo (16 ranks on the network)"),
        ({}, EIGHT_HOSTS, Capabilities(), "ps (every rank hosts a shard; no servers are named)"),
        ({}, World(0, 7, 0, 1), Capabilities(gloo=True), "ps (every rank hosts a shard; no servers are named)"),
        ({}, World(0, 8, 0, 8), Capabilities(gloo=True), "ps (every rank hosts a shard; no servers are named)"),
        ({"rate": 1e6}, EIGHT_HOSTS, Capabilities(gloo=True), "ps (every rank hosts a shard; no servers are named)"),
        ({"flows": 2}, EIGHT_HOSTS, Capabilities(gloo=True), "ps (every rank hosts a shard; no servers are named)"),
        ({"lane": "grpc"}, EIGHT_HOSTS, Capabilities(gloo=True), "ps (every rank hosts a shard; no servers are named)"),
        (SERVERS, EIGHT_HOSTS, Capabilities(gloo=True), "ps (servers=10.0.0.7:1,10.0.0.8:1)"),
        ({}, MPICH, Capabilities(mpi4py=True), "mpi (started by mpiexec (MPICH))"),
        ({}, OPENMPI, Capabilities(mpi4py=True, gloo=True), "mpi (started by mpirun (Open MPI))"),
        (
            {},
            OPENMPI,
            Capabilities(),
            'ps (started by mpirun (Open MPI), but mpi4py is missing: pip install "commsched[mpi]" gives mpi)',
        ),
        ({}, OPENMPI, EVERYTHING, "nccl (CUDA tensors, and cupy has NCCL)"),
        ({}, TORCHRUN, Capabilities(nccl=True), "ps (every rank hosts a shard; no servers are named)"),  # a model on the CPU
        (
            {},
            MPICH,
            Capabilities(cuda_tensors=True, mpi4py=True),
            "mpi (started by mpiexec (MPICH))",
        ),  # the plugin will refuse it
        ({"security": "tls"}, OPENMPI, EVERYTHING, "ps (security=tls, which the others do not have)"),
        ({"security": "tls"}, EIGHT_HOSTS, EVERYTHING, "ps (security=tls, which the others do not have)"),
        (SERVERS, OPENMPI, EVERYTHING, "ps (servers=10.0.0.7:1,10.0.0.8:1)"),
        (SERVERS, World(0, 1), EVERYTHING, "local (one rank, nothing to send)"),
    ],
)
def test_the_line(settings: dict, world: World, seen: Capabilities, line: str) -> None:
    assert str(choose(Settings(transport="auto", **settings), world, seen)) == f"transport=auto: {line}"


def test_what_is_set_is_not_questioned() -> None:
    assert choose(Settings(transport="gloo"), OPENMPI, EVERYTHING).name == "gloo"


def test_every_choice_is_a_transport_there_is() -> None:
    worlds, all_seen = (
        (World(0, 1), TORCHRUN, OPENMPI, EIGHT_HOSTS),
        (Capabilities(*seen) for seen in product([False, True], repeat=4)),
    )
    settings = (Settings(transport="auto"), Settings(transport="auto", **SERVERS))
    choices = {choose(*given).name for given in product(settings, worlds, all_seen)}
    assert choices == {"gloo", "local", "mpi", "nccl", "ps"} <= set(transport_names())


def test_one_rank_that_imports_torch_for_itself_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"imports torch": Capabilities(gloo=True), "does not": Capabilities()}
    monkeypatch.setattr("commsched.transports.open.detect_capabilities", seen.__getitem__)
    assert _names(["imports torch", "does not"]) == ["ps", "ps"]
    assert _names(["imports torch", "imports torch"]) == ["gloo", "gloo"]


def test_machines_with_different_numbers_of_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commsched.transports.open.detect_capabilities", lambda device: Capabilities(gloo=True))
    assert _names(["", ""], [1, 3]) == ["ps", "ps"]


def _names(devices: list[str], local_world_sizes: Sequence[int] = (1, 1)) -> list[str]:
    """Two of eight ranks see what stands for their devices. Return what each chooses."""
    ends = LocalControlWorld(len(devices)).ends

    def choose_as(rank: int) -> str:
        world = World(rank, 8, 0, local_world_sizes[rank], "torchrun")
        return transport_name(world, Settings(transport="auto"), devices[rank], ends[rank].gather_next)

    try:
        return run_world(len(devices), choose_as)
    finally:
        for end in ends:
            end.close()


SCRIPT = """
import sys
from commsched.transports import transport_names
from commsched.transports.open import detect_capabilities
seen = detect_capabilities("cuda:1")
assert "torch" not in sys.modules and "mpi4py" not in sys.modules
assert seen.cuda_tensors and not seen.nccl and not seen.gloo, seen
"""


def test_looking_imports_no_engine() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=300)


def test_looking_at_a_torch_that_is_there() -> None:
    torch = pytest.importorskip("torch")
    seen = detect_capabilities("cpu")
    assert not seen.cuda_tensors
    assert seen.gloo == torch.distributed.is_gloo_available()


@pytest.mark.parametrize("available", [True, False])
def test_looking_at_a_cupy_that_is_there(available: bool) -> None:
    with in_place_of_cupy(SimulatedDevice()) as cupy:
        cupy.cuda.nccl.available = available
        assert detect_capabilities("cuda:0").nccl is available
        assert not detect_capabilities("cpu").nccl
