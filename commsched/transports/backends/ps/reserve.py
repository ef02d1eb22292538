"""Reserving a parameter server that was started by hand: what the launcher of an elastic job does before each generation."""

from __future__ import annotations

import threading
from time import monotonic

from ....core.errors import CommschedError, ProtocolError
from ....settings import each_of
from .frame import Frame, FrameKind
from .stream import StreamBroken, StreamOptions, open_streams


def reserve(address: str, options: StreamOptions, job: str, within_seconds: float) -> str:
    """Let the server at ``address`` serve ``job`` next, and no other, which its workers prove by that name. A server that has
    another job in hand does so when that has ended.

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
        try:
            if any(frame.kind is FrameKind.HELLO for frame in stream.frames(_nothing)):
                return ""
        except StreamBroken:
            if monotonic() < deadline:
                return "nobody answers there"
        except CommschedError as error:
            if monotonic() < deadline:
                return str(error)
        finally:
            timer.cancel()
            stream.close()
    return f"it did not answer within {within_seconds:g} s; it may be stopped, or serve another job"


def _nothing(frame: Frame) -> memoryview:
    raise ProtocolError(f"{frame.kind.name} out of turn")
