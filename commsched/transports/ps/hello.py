"""Hello: the first message of a worker on each stream."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ...core.errors import ConfigError, ProtocolError


@dataclass(frozen=True, slots=True)
class Hello:
    """``rank`` of ``world_size`` greets the server it counts as number ``server``. ``control_address`` is where rank 0's
    control channel listens, for a server that was not started by a rank. ``members`` and ``divisor``: see ``TransportContext``;
    None: the ranks are those of the job."""

    rank: int
    world_size: int
    server: int
    control_address: str | None = None
    members: tuple[int, ...] | None = None
    divisor: int | None = None

    @property
    def member(self) -> int:
        """What messages call ``rank``."""
        return self.rank if self.members is None else self.members[self.rank]

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Any) -> Hello:
        """The inverse of :meth:`to_record`.

        Raises:
            ProtocolError: ``record`` is not what :meth:`to_record` makes.
            ConfigError: the rank is not below the world size.
        """
        wanted = {f.name for f in fields(cls)}
        if not isinstance(record, dict) or record.keys() != wanted:
            raise ProtocolError(f"a hello holds {', '.join(sorted(wanted))}; this one does not")
        members = record["members"]
        if not isinstance(members, list | tuple | None):
            raise ProtocolError("a hello holds a value of the wrong type")
        numbers = [record["rank"], record["world_size"], record["server"], *(members or ())]
        numbers += [] if record["divisor"] is None else [record["divisor"]]
        address = record["control_address"]
        if not all(type(n) is int and 0 <= n < 2**31 for n in numbers) or not isinstance(address, str | None):
            raise ProtocolError("a hello holds a value of the wrong type")
        hello = cls(**{**record, "members": None if members is None else tuple(members)})
        if hello.rank >= hello.world_size:
            raise ConfigError(f"rank {hello.rank} is not below its world size of {hello.world_size}")
        if (hello.members is not None and len(hello.members) != hello.world_size) or hello.divisor == 0:
            raise ConfigError(
                f"rank {hello.rank} says that its world of {hello.world_size} ranks has the members {hello.members} and "
                f"divisor {hello.divisor}"
            )
        return hello
