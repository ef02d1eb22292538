import pytest

from commsched.core.errors import ConfigError
from commsched.core.world import World, detect_world

OWN = {"COMMSCHED_RANK": "1", "COMMSCHED_WORLD_SIZE": "4", "COMMSCHED_LOCAL_RANK": "1", "COMMSCHED_LOCAL_WORLD_SIZE": "4"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "3",
}


@pytest.mark.parametrize(
    ("environ", "world"),
    [
        ({}, World(0, 1, 0, 1, "none")),
        (OWN, World(1, 4, 1, 4, "commsched run")),
        (TORCHRUN, World(3, 4, 1, 2, "torchrun")),
        (OPEN_MPI, World(5, 8, 1, 4, "mpirun (Open MPI)")),
        (MPICH, World(2, 4, 0, 2, "mpiexec (MPICH)")),
        (SRUN, World(6, 7, 0, 1, "srun")),
    ],
)
def test_each_launcher(environ: dict[str, str], world: World) -> None:
    assert detect_world({"HOME": "/root", **environ}) == world


def test_torchrun_inside_a_slurm_step_is_believed() -> None:
    assert detect_world(SRUN | TORCHRUN).launcher == "torchrun"


def test_our_own_launcher_is_believed_before_all_others() -> None:
    assert detect_world(SRUN | TORCHRUN | OPEN_MPI | MPICH | OWN).launcher == "commsched run"


def test_a_slurm_allocation_without_srun_is_one_rank() -> None:
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert detect_world(batch_script) == World()


@pytest.mark.parametrize(
    ("per_node", "node", "local_world_size"),
    [("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("7", 0, 7), ("3,4", 1, 4), ("1(x2),5", 2, 5)],
)
def test_slurms_tasks_per_node(per_node: str, node: int, local_world_size: int) -> None:
    world = detect_world(SRUN | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)})
    assert world.local_world_size == local_world_size


def test_without_local_variables_all_ranks_are_on_this_machine() -> None:
    world = detect_world({"RANK": "1", "WORLD_SIZE": "2"})
    assert (world.local_world_size, world.one_machine) == (2, True)


def test_one_machine() -> None:
    assert detect_world({}).one_machine
    assert detect_world(OWN).one_machine
    assert not detect_world(TORCHRUN).one_machine


IMPOSSIBLE = "torchrun gave an impossible world:"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "4"}, f"{IMPOSSIBLE} RANK=4, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_RANK": "2"}, f"{IMPOSSIBLE} RANK=3, WORLD_SIZE=4, LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
        (
            {"LOCAL_WORLD_SIZE": "5"},
            f"{IMPOSSIBLE} RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=5",
        ),
        ({"WORLD_SIZE": "0"}, f"{IMPOSSIBLE} RANK=3, WORLD_SIZE=0, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2"),
        ({"RANK": "first"}, "RANK='first' is not a number, but the launcher's other variables are set"),
        ({"RANK": "-1"}, "RANK='-1' is not a number, but the launcher's other variables are set"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' is not a number, but the launcher's other variables are set"),
    ],
)
def test_contradictions_are_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        detect_world(TORCHRUN | changes)
    assert str(raised.value) == said


def test_a_size_without_a_rank_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^RANK='' is not a number, but the launcher's other variables are set$"):
        detect_world({"WORLD_SIZE": "2"})


@pytest.mark.parametrize("changes", [{"SLURM_NODEID": "4"}, {"SLURM_STEP_TASKS_PER_NODE": "many"}, {"SLURM_LOCALID": "1"}])
def test_contradictions_of_slurm_are_named(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^srun gave an impossible world: SLURM_PROCID=6, SLURM_STEP_NUM_TASKS=7, "):
        detect_world(SRUN | changes)
