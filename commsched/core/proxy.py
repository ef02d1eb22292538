"""DependencyProxy: what an engine waits on before it may use a tensor's average."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import Core


class DependencyProxy:
    """Closed from ``begin_step`` until the averages of all partitions of one tensor are in place.

    ``is_open`` may be read by any thread at any time, and any may ``wait``, which raises the session's failure instead of
    waiting for ever. Before the first step it is open, though there is no average.
    """

    __slots__ = ("_core", "_missing", "is_open", "name")

    def __init__(self, core: Core, name: str) -> None:
        self._core = core
        self._missing = 0
        self.is_open = True
        self.name = name

    def wait(self) -> None:
        """Return when the average is in place.

        Raises:
            CommschedError: the session failed or was closed meanwhile.
        """
        if not self.is_open:
            self._core.wait_for(self)

    # The two below are called by Core with its lock held.

    def close(self, partitions: int) -> None:
        self._missing = partitions
        self.is_open = partitions == 0

    def partition_done(self) -> bool:
        """One partition's average is in place; True when it was the last and the proxy has opened."""
        self._missing -= 1
        self.is_open = self._missing == 0
        return self.is_open

    def __repr__(self) -> str:
        return f"<DependencyProxy '{self.name}' {'open' if self.is_open else f'waits for {self._missing} partitions'}>"
