"""Who takes part in a job."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

ROLES = ("rank", "server")


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a job: rank ``index`` of ``world_size`` or parameter server ``index``; made by it about itself."""

    role: str
    index: int
    world_size: int  # what a rank believes; 0 for a server, which is not told
    host: str
    pid: int

    @classmethod
    def rank(cls, rank: int, world_size: int, host: str | None = None) -> Member:
        """This process as a rank; ``host`` is what messages call its machine."""
        return cls("rank", rank, world_size, host or socket.gethostname(), os.getpid())

    @classmethod
    def server(cls, index: int, host: str | None = None) -> Member:
        """This process as a parameter server."""
        return cls("server", index, 0, host or socket.gethostname(), os.getpid())

    @property
    def is_rank(self) -> bool:
        return self.role == "rank"

    @property
    def process(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def __str__(self) -> str:
        return f"{self.role} {self.index} ({self.process})"
