"""Lane: the way between one worker and one parameter server."""

from __future__ import annotations

from typing import Protocol

from ...core.errors import CommschedError
from ...core.manifest import Manifest
from ...core.task import CommTask
from ..contributions import Key
from .frame import Frame


class LaneListener(Protocol):
    """Whom a lane tells. Called from the lane's own threads, or inside ``push``, without a lock held; for one key
    ``on_sent`` has returned before ``on_result`` is called. ``server`` is the index the lane was made with."""

    def on_sent(self, server: int, key: Key) -> None:
        """That push has left this rank."""
        ...

    def destination(self, server: int, frame: Frame) -> memoryview:
        """Where the average that ``frame`` announces may be put.

        Raises:
            ProtocolError: nothing of ours waits for it.
        """
        ...

    def on_result(self, server: int, frame: Frame) -> None:
        """The average of ``frame.key``: its payload is the ``destination``, or read-only and to be copied there.

        Raises:
            ProtocolError: nothing of ours waits for it.
        """
        ...

    def on_end(self, server: int) -> None:
        """The server ended in good order; nothing more comes."""
        ...

    def on_broken(self, server: int, error: CommschedError) -> None:
        """The lane failed, or the server told of a failure; nothing more comes."""
        ...


class Lane(Protocol):
    """Carries pushes to one server and its results back."""

    def add_group(self, group: int, manifest: Manifest) -> None:
        """Announce a group before its first push."""
        ...

    def push(self, task: CommTask) -> None:
        """Send ``task.data``, which must stay as it is until the result has come. Never waits for other ranks.

        Raises:
            PeerLost: the server is gone.
        """
        ...

    def leave(self, rank: int) -> None:
        """Tell the server that ``rank`` will push nothing more, so that nobody waits for it."""
        ...

    def close(self, graceful: bool) -> None:
        """Say goodbye, if ``graceful``, and end; the listener is not called afterwards. Idempotent."""
        ...
