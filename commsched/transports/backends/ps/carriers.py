"""The carriers of streams between workers and servers, by the name that a user gives as ``lane``."""

from __future__ import annotations

from .rate_limiter import RateLimiter
from .send_queue import SendQueue
from .stream import Port, WorkerStream


def open_stream(
    lane: str, peer: str, address: str, token: str, job: str, outbox: SendQueue, fail_after_seconds: float
) -> WorkerStream:
    """Return a worker's end of a stream to the server at ``address``. It connects when its ``frames`` are iterated.

    Args:
        lane: ``tcp`` or ``grpc``; the same on both ends.
        peer: the name of the server in messages, such as ``server 1 at 10.0.0.7:4242``.
        job: the job's name, which the worker proves with the token.
        fail_after_seconds: bounds how long a frozen connection lives; the same for all processes of a job.
    """
    if lane == "grpc":
        from .grpc_lane import GrpcStream

        return GrpcStream(peer, address, token, job, outbox, fail_after_seconds)
    from .tcp_stream import TcpStream

    return TcpStream(peer, address, token, job, outbox, fail_after_seconds)


def open_port(lane: str, address: str, token: str, pacer: RateLimiter | None, fail_after_seconds: float) -> Port:
    """Return a server's port at ``address``, which is ``host:port``. Port 0 means any free port.

    Raises:
        ConfigError: the server cannot listen at the address, or the token is empty.
    """
    if lane == "grpc":
        from .grpc_lane import GrpcPort

        return GrpcPort(address, token, pacer, fail_after_seconds)
    from .tcp_port import TcpPort

    return TcpPort(address, token, pacer, fail_after_seconds)
