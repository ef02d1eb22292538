"""DependencyProxy: an engine waits on it before it uses a tensor's average."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import Core


class DependencyProxy:
    """Closed from ``begin_step`` until the averages of all partitions of one tensor are complete.

    Any thread may read ``is_open`` at any time. Any thread may call ``wait``, which raises the session's failure instead of
    waiting for ever. The proxy is open before the first step, although there is no average yet.
    """

    __slots__ = ("_core", "_missing", "is_open", "name")

    def __init__(self, core: Core, name: str) -> None:
        self._core = core
        self._missing = 0
        self.is_open = True
        self.name = name

    def wait(self) -> None:
        """Return when the average is complete.

        Raises:
            CommschedError: the session failed or was closed meanwhile.
        """
        if not self.is_open:
            self._core.wait_for(self)

    # Core calls the two methods below with its lock held.

    def close(self, partitions: int) -> None:
        self._missing = partitions
        self.is_open = partitions == 0

    def partition_done(self) -> bool:
        """Note that one partition's average is complete. True if it was the last, so that the proxy opened."""
        self._missing -= 1
        self.is_open = self._missing == 0
        return self.is_open

    def __repr__(self) -> str:
        return f"<DependencyProxy '{self.name}' {'open' if self.is_open else f'waits for {self._missing} partitions'}>"
