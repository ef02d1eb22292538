"""The identity of a process that takes part in a job."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

ROLES = ("rank", "server")


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a job: rank ``index`` of ``world_size``, or parameter server ``index``. Each process describes itself."""

    role: str
    index: int
    world_size: int  # according to this rank; 0 for a server, which does not know it
    host: str
    pid: int
    witness: str = ""  # address at which to ask whether the process runs; see ``witness.py``

    @classmethod
    def rank(cls, rank: int, world_size: int, host: str | None = None, witness: str = "") -> Member:
        """This process as a rank; ``host`` is the name of its machine in messages."""
        return cls("rank", rank, world_size, host or socket.gethostname(), os.getpid(), witness)

    @classmethod
    def thread(cls, rank: int, world_size: int) -> Member:
        """A rank that is a thread of this process, as all others are."""
        return cls("rank", rank, world_size, "", os.getpid())

    @classmethod
    def server(cls, index: int, host: str | None = None, witness: str = "") -> Member:
        """This process as a parameter server."""
        return cls("server", index, 0, host or socket.gethostname(), os.getpid(), witness)

    @property
    def is_rank(self) -> bool:
        return self.role == "rank"

    @property
    def about(self) -> dict[str, Any]:
        """The fields of an error that is about this process."""
        return {self.role: self.index}

    @property
    def process(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def __str__(self) -> str:
        return f"{self.role} {self.index} ({self.process})" if self.host else f"{self.role} {self.index}"
