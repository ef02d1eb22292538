"""commsched: a communication scheduler for distributed deep-learning training.

Importing this package starts nothing, reads no environment and imports no engine, gRPC or MPI.
"""

from .core.errors import (
    ClosedError,
    CommschedError,
    ConfigError,
    ManifestMismatch,
    OrderMismatch,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    RanksDiverged,
    TransportError,
    UnsupportedError,
)
from .core.scheduler import SchedulerConfig
from .session.elastic import Elastic
from .session.process import end_first, init, is_elastic, require_world_size, shutdown
from .session.session import Session
from .version import __version__

__all__ = [
    "__version__",
    "end_first",
    "init",
    "is_elastic",
    "require_world_size",
    "shutdown",
    "Elastic",
    "Session",
    "SchedulerConfig",
    "CommschedError",
    "ConfigError",
    "UnsupportedError",
    "ManifestMismatch",
    "OrderMismatch",
    "RanksDiverged",
    "ProtocolError",
    "TransportError",
    "PeerLost",
    "PeerTimeout",
    "ClosedError",
]
