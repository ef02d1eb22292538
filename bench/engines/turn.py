"""The engines of this benchmark, and one turn of a system of an engine: its arguments and its results.

An engine is found by name: ``jax`` is ``bench/engines/jax.py``. Each engine's module has a dictionary ``SYSTEMS``:
``commsched``, and the engine's own ways of data-parallel training, as functions of a :class:`Turn`. All of them train the same
EMULATED layers.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from commsched import ConfigError, Session
from commsched.simulator.profile import Profile

from ..harness.measure import cpu_seconds

_KNOWN_WITHIN_SECONDS = 60.0


@dataclass
class Steps:
    """The end of each step on this rank, in seconds of ``time.monotonic``, when its loss is known, and the CPU time until then.
    CPU time is of this process and of ``servers``, the ids of the processes that serve this rank."""

    servers: list[int] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def over(self) -> None:
        self.cpu_seconds.append(cpu_seconds(self.servers))
        self.ended.append(time.monotonic())


@dataclass(frozen=True)
class Turn:
    """One training of ``count`` steps; each step must be reported to ``steps``.

    ``profile`` has the layers: the times for which they sleep, and the shapes of their gradients (float32); see ``emulated``.
    ``hosts`` are the addresses at which ranks reach each other, by rank. Every system has a session. A system that does not
    average by it may still use its ``gather``, for example to agree on ports.
    """

    session: Session
    profile: Profile
    count: int
    hosts: Sequence[str]
    steps: Steps = field(default_factory=Steps)


def free_addresses(turn: Turn) -> list[str]:
    """``host:port`` on each rank's host, with a port that is free now. Collective; rank 0 is not the first to return.

    Rank 0 waits until all other ranks have confirmed the addresses. Its next call may hold Python's lock until the other ranks
    do their part, as TensorFlow's start of collectives does. Without the confirmation, rank 0's gathered addresses might not
    have been sent by then.
    """
    hosts, rank = turn.hosts, turn.session.rank
    with socket.create_server((hosts[rank], 0)) as listener:
        ports = turn.session.gather(listener.getsockname()[1])
        listener.settimeout(_KNOWN_WITHIN_SECONDS)
        if rank == 0:
            for _ in hosts[1:]:
                with listener.accept()[0] as connection:
                    connection.recv(1)  # waits for its end: the side that closes first keeps the port
        else:
            socket.create_connection((hosts[0], ports[0]), _KNOWN_WITHIN_SECONDS).close()
    return [f"{host}:{port}" for host, port in zip(hosts, ports)]


#: A system of an engine. It trains and returns ``emulated.coefficients`` of the weights, or None if it trains asynchronously,
#: to other weights.
Train = Callable[[Turn], Sequence[float] | None]


ENGINES = ("tensorflow", "mxnet", "jax")


def systems_of(engine: str) -> Mapping[str, Train]:
    """The systems of ``engine``, by name. Imports the engine.

    Raises:
        ConfigError: there is no such engine, or it is not installed here.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine}: must be one of {', '.join(ENGINES)}")
    try:
        found: Mapping[str, Train] = import_module(f"{__package__}.{engine}").SYSTEMS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(("bench", "commsched")):
            raise
        raise ConfigError(
            f'engine={engine}: {error}: pip install "commsched[{engine}]", or take the environment that has it, which in a '
            f"checkout is .venv-{engine}/bin/python after make test"
        ) from error
    return found
