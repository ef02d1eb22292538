"""The Ray Train plugin on a cluster of several raylets on this machine: ``make ray``, as Ray has an environment of its own."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from commsched import ConfigError

pytest.importorskip("ray", reason="Ray is not installed; make ray makes an environment that has it")

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from commsched.plugins.ray import CommschedConfig
from commsched.settings import Budget
from tests.jobs.job import ROOT

from .ray_loop import STEPS, inputs_of, model_of, train, weights_of

#: Ray warns of what it does itself.
pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]
#: Ray gives up sooner than a busy machine has started a process.
PATIENCE = {
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
}
MEMORY = 80 * 2**20  # of each raylet's object store, which nothing is put into


def node() -> dict[str, int]:
    """Arguments of a node. A raylet that need not ask its agents for their ports does not give up when they are slow."""
    names = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("", 0))) for _ in names]
        ports = [probe.getsockname()[1] for probe in probes]
    return {**dict(zip(names, ports, strict=True)), "object_store_memory": MEMORY}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes: a head with room for a server, and two with room for a worker each."""
    os.environ.update(PATIENCE)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"server": 1}, **node()})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, resources={"worker": 1}, **node())
        ray.init(made.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def run(directory: Path, config: CommschedConfig, failures: int = 0, **loop: Any) -> None:
    TorchTrainer(
        train,
        train_loop_config={"directory": str(directory), **loop},
        torch_config=config,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "worker": 1}, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=str(directory), failure_config=FailureConfig(max_failures=failures)),
    ).fit()


def expected() -> Any:
    """The weights of one process on the joint batch."""
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat([inputs_of(rank, step) for rank in range(2)])).square().mean().backward()
        optimizer.step()
    return weights_of(model)


def require_trained(directory: Path) -> list[list[str]]:
    """The weights are right; returns what each rank said of its environment."""
    both = [torch.load(directory / f"{rank}.pt") for rank in range(2)]
    assert torch.equal(*both)
    torch.testing.assert_close(both[0], expected())
    said = [(directory / f"{rank}.txt").read_text().split() for rank in range(2)]
    assert said[0] == said[1]
    assert said[0][0] == "2"
    return said


def servers_running() -> list[int]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if b"commsched" in words and b"server" in words and state != "Z":
            found.append(int(pid))
    return found


def test_workers_find_each_other(cluster: Cluster, tmp_path: Path) -> None:
    run(tmp_path, CommschedConfig(settings={"transport": "ps"}))
    [_, control, servers, _] = require_trained(tmp_path)[0]
    assert re.fullmatch(r"[\d.]+:\d+", control)
    assert servers == "-"


def test_servers_are_actors_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    before = servers_running()
    run(tmp_path, CommschedConfig(backend="gloo", servers=1, server_resources={"CPU": 1, "server": 1}))
    [_, _, servers, _] = require_trained(tmp_path)[0]
    assert re.fullmatch(r"[\d.]+:\d+", servers)
    assert servers_running() == before


def test_a_worker_that_is_killed_is_named(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError) as raised:
        run(tmp_path, CommschedConfig(), kill_rank=1)
    said = str(raised.value)
    assert re.search(r"PeerLost: rank 1 .*is gone", said), said
    assert not list(tmp_path.glob("*.pt"))


def test_workers_that_are_started_again_find_each_other_again(cluster: Cluster, tmp_path: Path) -> None:
    run(tmp_path, CommschedConfig(servers=1, server_resources={"CPU": 1, "server": 1}), failures=1, kill_rank=1)
    assert (tmp_path / "killed").exists()
    require_trained(tmp_path)


def test_a_loop_that_fails_is_named(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ray.train.WorkerGroupError, match="boom"):
        run(tmp_path, CommschedConfig(), fail_rank=1)


def test_servers_for_which_there_is_no_room(cluster: Cluster, tmp_path: Path) -> None:
    config = CommschedConfig(servers=2, server_resources={"server": 1}, start_servers_within_s=5)
    with pytest.raises(Exception, match=r"Ray did not start 2 parameter servers within 5 s; is there a node with room for"):
        run(tmp_path, config)


def test_settings_that_the_plugin_makes_or_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="settings: control, token is made for each group of workers; leave it out"):
        CommschedConfig(settings={"control": "h:1", "token": "x"})
    with pytest.raises(ConfigError, match="transprot is not a setting; did you mean transport"):
        CommschedConfig(settings={"transprot": "ps"})
    with pytest.raises(ConfigError, match=r"tune=Budget.* cannot be set by the environment"):
        CommschedConfig(settings={"tune": Budget(trials=3)})
