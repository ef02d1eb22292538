"""Ray Train plugin.

    from commsched.plugins.ray import CommschedConfig
    trainer = TorchTrainer(train_loop, torch_config=CommschedConfig(), scaling_config=ScalingConfig(num_workers=8))

It does what ``TorchConfig`` does, and lets the workers find each other: each gets the address of rank 0's control channel and
a token that is made for this group of workers. With ``servers`` it also starts parameter servers, each in an actor of its own.
The training loop is the one of ``commsched.plugins.torch``.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import commsched

from ..core.errors import ConfigError, PeerTimeout
from ..core.ports import free_port
from ..settings import to_environ

try:
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig
    from ray.util import get_node_ip_address
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs Ray Train: pip install "commsched[ray]"', name="ray") from error

__all__ = ["CommschedConfig"]

_PR_SET_PDEATHSIG = 1
_SAYS_WHERE = "commsched server listening on "
#: Settings that this plugin makes itself.
_OURS = ("control", "servers", "token", "token_file")


@dataclass
class CommschedConfig(TorchConfig):  # type: ignore[misc, unused-ignore]
    """``TorchConfig`` with what commsched needs.

    Args:
        servers: number of parameter servers; 0: every worker hosts a shard.
        server_resources: what Ray reserves for each server. A resource that only some nodes have places the servers there.
            Otherwise they are spread over the nodes that have neither a GPU nor a worker, if there are any.
        settings: settings of commsched, as for ``commsched.init``.
        start_servers_within_s: seconds within which Ray must have started the servers.
    """

    servers: int = 0
    server_resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    settings: Mapping[str, Any] = field(default_factory=dict)
    start_servers_within_s: float = 60.0

    def __post_init__(self) -> None:
        ours = [name for name in _OURS if name in self.settings]
        if ours:
            raise ConfigError(f"settings: {', '.join(ours)} is made for each group of workers; leave it out")
        to_environ(self.settings)  # raises for an unknown name or a wrong value

    @property
    def backend_cls(self) -> type[Backend]:
        return _CommschedBackend

    @property
    def train_func_context(self) -> Any:
        return partial(_within_session, super().train_func_context)


class _CommschedBackend(Backend):  # type: ignore[misc, unused-ignore]
    """Runs in Ray Train's controller, beside the backend of ``TorchConfig``."""

    share_cuda_visible_devices = True  # as TorchConfig's

    def __init__(self) -> None:
        self._torch = TorchConfig().backend_cls()
        self._servers: list[Any] = []

    def on_start(self, worker_group: Any, backend_config: CommschedConfig) -> None:
        self._torch.on_start(worker_group, backend_config)
        environ = to_environ(backend_config.settings)
        environ["COMMSCHED_TOKEN"] = secrets.token_hex(32)
        if backend_config.servers:
            nodes = worker_group.execute(_node_id)
            self._servers = _place_servers(backend_config, set(nodes))
            environ["COMMSCHED_SERVERS"] = ",".join(_start_servers(self._servers, environ, backend_config))
        environ["COMMSCHED_CONTROL"] = worker_group.execute_single(0, _free_address)
        worker_group.execute(_set_environ, environ)

    def on_training_start(self, worker_group: Any, backend_config: CommschedConfig) -> None:
        self._torch.on_training_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: CommschedConfig) -> None:
        try:
            self._torch.on_shutdown(worker_group, backend_config)
        finally:
            for server in self._servers:
                ray.kill(server)
            self._servers = []


def _place_servers(config: CommschedConfig, nodes_of_workers: set[str]) -> list[Any]:
    """An actor for each server; Ray starts it once there is room."""
    resources = dict(config.server_resources)
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU", 0), "num_gpus": resources.pop("GPU", 0), "resources": resources}
    free = sorted(
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"]
        and not node["Resources"].get("GPU")
        and node["NodeID"] not in nodes_of_workers
        and all(node["Resources"].get(name, 0) >= amount for name, amount in config.server_resources.items())
    )
    actors = []
    for number in range(config.servers):
        where = NodeAffinitySchedulingStrategy(free[number % len(free)], soft=True) if free else "SPREAD"
        actors.append(ray.remote(_ServerActor).options(scheduling_strategy=where, **options).remote())
    return actors


def _start_servers(actors: Sequence[Any], environ: Mapping[str, str], config: CommschedConfig) -> list[str]:
    """The address of each server, once it listens there."""
    try:
        starting = [actor.start.remote(dict(environ)) for actor in actors]
        addresses: list[str] = ray.get(starting, timeout=config.start_servers_within_s)
        return addresses
    except BaseException as error:
        for actor in actors:
            ray.kill(actor)
        if isinstance(error, GetTimeoutError):
            raise PeerTimeout(
                f"Ray did not start {len(actors)} parameter servers within {config.start_servers_within_s:g} s; is there a "
                f"node with room for {dict(config.server_resources)} beside the workers?"
            ) from error
        raise


class _ServerActor:
    """A parameter server, as a process of its own that ends with this actor."""

    def start(self, environ: Mapping[str, str]) -> str:
        """Start it, and return its address."""
        host = get_node_ip_address()
        command = [sys.executable, "-m", "commsched", "server", "--bind", f"{f'[{host}]' if ':' in host else host}:0"]
        self._process = subprocess.Popen(
            command, env={**os.environ, **environ}, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(_SAYS_WHERE):
            raise ConfigError(
                f"{' '.join(command)} ended with exit code {self._process.wait()}; its error is in the actor's log"
            )
        # A thread reads what the server prints later: the server would stop as soon as the pipe is full.
        threading.Thread(target=sys.stderr.writelines, args=(self._process.stdout,), daemon=True).start()
        return line.removeprefix(_SAYS_WHERE).strip()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# --- in each worker ---


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _free_address() -> str:
    host = get_node_ip_address()
    return f"{f'[{host}]' if ':' in host else host}:{free_port(host)}"


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.update(environ)


@contextmanager
def _within_session(around: Any) -> Iterator[None]:
    """Close the session when the training loop has returned: Ray may kill a worker as soon as that is so. If the loop raises,
    Ray ends all workers, and reports the error of each."""
    context: AbstractContextManager[Any] = around()
    with context:
        yield
        commsched.shutdown()
