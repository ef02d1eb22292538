"""Hello: the first message of a worker on each stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...core.errors import ConfigError, ProtocolError


@dataclass(frozen=True, slots=True)
class Hello:
    """``rank`` of ``world_size`` greets the server it counts as number ``server``. ``control_address`` is where rank 0's
    control channel listens, for a server that was not started by a rank."""

    rank: int
    world_size: int
    server: int
    control_address: str | None = None

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> Hello:
        """The inverse of :meth:`to_record`.

        Raises:
            ProtocolError: ``record`` is not what :meth:`to_record` makes.
            ConfigError: the rank is not below the world size.
        """
        wanted = {"rank", "world_size", "server", "control_address"}
        if not isinstance(record, dict) or record.keys() != wanted:
            raise ProtocolError(f"a hello holds {', '.join(sorted(wanted))}; this one does not")
        numbers = [record["rank"], record["world_size"], record["server"]]
        address = record["control_address"]
        if not all(type(n) is int and 0 <= n < 2**31 for n in numbers) or not isinstance(address, str | None):
            raise ProtocolError("a hello holds a value of the wrong type")
        hello = cls(**record)
        if hello.rank >= hello.world_size:
            raise ConfigError(f"rank {hello.rank} is not below its world size of {hello.world_size}")
        return hello
