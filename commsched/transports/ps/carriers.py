"""What carries streams between workers and servers, by the name a user gives as ``lane``."""

from __future__ import annotations

from .outbox import Outbox
from .pacer import Pacer
from .stream import Port, WorkerStream


def open_stream(lane: str, peer: str, address: str, token: str, outbox: Outbox, fail_after_seconds: float) -> WorkerStream:
    """A worker's end of a stream to the server at ``address``; connects when its frames are asked for.

    Args:
        lane: ``tcp`` or ``grpc``; the same on both ends.
        peer: what messages call the server, such as ``server 1 at 10.0.0.7:4242``.
        fail_after_seconds: bounds how long a frozen connection lives; the same for all processes of a job.
    """
    if lane == "grpc":
        from .grpc_stream import GrpcStream

        return GrpcStream(peer, address, token, outbox, fail_after_seconds)
    from .tcp_stream import TcpStream

    return TcpStream(peer, address, token, outbox, fail_after_seconds)


def open_port(lane: str, address: str, token: str, pacer: Pacer | None, fail_after_seconds: float) -> Port:
    """A server's port at ``address``, ``host:port``; port 0: any free one.

    Raises:
        ConfigError: the address cannot be listened at, or the token is empty.
    """
    if lane == "grpc":
        from .grpc_port import GrpcPort

        return GrpcPort(address, token, pacer, fail_after_seconds)
    from .tcp_port import TcpPort

    return TcpPort(address, token, pacer, fail_after_seconds)
