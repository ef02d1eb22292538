"""What one system of an engine is given to train, and what it gives back: between ``rank`` and the engines."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from commsched.simulator.profile import Profile

from ..cpu_time import cpu_seconds

if TYPE_CHECKING:
    from commsched.session import Session

_KNOWN_WITHIN_SECONDS = 60.0


@dataclass
class Steps:
    """When each step was over on this rank, in seconds of ``time.monotonic``: its loss is known; and the processor time until
    then, of this process and of ``servers``, the ids of processes that serve this rank beside it."""

    servers: list[int] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def over(self) -> None:
        self.cpu_seconds.append(cpu_seconds(self.servers))
        self.ended.append(time.monotonic())


@dataclass(frozen=True)
class Turn:
    """One training of ``count`` steps, each to be told to ``steps``.

    ``profile`` has the layers, whose times are to be slept and whose shapes are the gradients' (float32); see ``emulated``.
    ``hosts`` are the addresses at which ranks reach each other, by rank. A session is there for every system: those that do not
    average by it may ``gather`` with it, to agree on ports, say.
    """

    session: Session
    profile: Profile
    count: int
    hosts: Sequence[str]
    steps: Steps = field(default_factory=Steps)


def free_addresses(turn: Turn) -> list[str]:
    """``host:port`` on each rank's host, with a port that is free now. Collective; rank 0 is not the first to return.

    Rank 0 hears from all others that they know, since what it does next may hold Python's lock until they do their part:
    TensorFlow starts collectives so. What rank 0 has gathered might not have left by then.
    """
    hosts, rank = turn.hosts, turn.session.rank
    with socket.create_server((hosts[rank], 0)) as listener:
        ports = turn.session.gather(listener.getsockname()[1])
        listener.settimeout(_KNOWN_WITHIN_SECONDS)
        if rank == 0:
            for _ in hosts[1:]:
                with listener.accept()[0] as connection:
                    connection.recv(1)  # its end: who closes first is left with the port
        else:
            socket.create_connection((hosts[0], ports[0]), _KNOWN_WITHIN_SECONDS).close()
    return [f"{host}:{port}" for host, port in zip(hosts, ports)]


#: A system of an engine. Trains, and returns what ``emulated.coefficients`` says of the weights; None if it trains
#: asynchronously, to weights of its own.
Train = Callable[[Turn], Sequence[float] | None]
