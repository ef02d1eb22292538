"""Reserving a parameter server that was started by hand: what the launcher of an elastic job does before each generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from time import monotonic

from ....core.errors import CommschedError, ProtocolError
from ....settings import each_of
from .frame import Frame, FrameKind
from .stream import StreamBroken, StreamOptions, WorkerStream, open_streams


def reserve(address: str, options: StreamOptions, job: str, within_seconds: float, when_ended: Callable[[], object]) -> str:
    """Let the server at ``address`` serve ``job`` next, and no other, which its workers prove by that name. A server that has
    another job in hand does so when that has ended. If this process ends before a worker comes, it is free again.

    Args:
        when_ended: called once, from a thread, when a server that was reserved has ended, or has ended that job.

    Returns:
        Why it does not, for the middle of a sentence; "" if it does.
    """
    deadline = monotonic() + within_seconds
    while (left := deadline - monotonic()) > 0:
        [stream] = open_streams("it", each_of(address)[0], options, job, waits=False)
        timer = threading.Timer(left, stream.abort)
        timer.daemon = True
        timer.start()
        stream.outbox.put_control(Frame(FrameKind.RESERVE))
        frames = stream.frames(_nothing)
        is_watched = False
        try:
            if any(frame.kind is FrameKind.HELLO for frame in frames):
                watched = (stream, frames, when_ended)
                threading.Thread(target=_watch, args=watched, name="commsched-reserved", daemon=True).start()
                is_watched = True
                return ""
        except StreamBroken:
            if monotonic() < deadline:
                return "nobody answers there"
        except CommschedError as error:
            if monotonic() < deadline:
                return str(error)
        finally:
            timer.cancel()
            if not is_watched:
                stream.close()
    return f"it did not answer within {within_seconds:g} s; it may be stopped, or serve another job"


def _watch(stream: WorkerStream, frames: Iterator[Frame], when_ended: Callable[[], object]) -> None:
    """Wait until the server ends ``stream``: when it has ended the job, at the latest."""
    with closing(stream), suppress(StreamBroken, CommschedError):
        for _ in frames:
            pass
    when_ended()


def _nothing(frame: Frame) -> memoryview:
    raise ProtocolError(f"{frame.kind.name} out of turn")
