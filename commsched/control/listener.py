"""Whom a member's end of the control channel tells what happens."""

from __future__ import annotations

from typing import Any, Protocol

from ..core.errors import CommschedError


class Listener(Protocol):
    """Called one call at a time, without any lock held, from a control thread; may call back into the client except ``close``
    and what waits for other ranks. The first call may come before the client's constructor has returned its object."""

    def on_failure(self, error: CommschedError) -> None:
        """The job failed; ``error`` names the first cause. At most once, and nothing else is called after it."""
        ...

    def on_leave(self, rank: int) -> None:
        """Another rank will send nothing more."""
        ...

    def on_end(self) -> None:
        """For servers: every rank has left."""
        ...

    def on_told(self, rank: int, value: Any) -> None:
        """For rank 0: ``rank`` told it ``value``. All that a rank told comes before its ``on_leave``."""
        ...

    def on_announced(self, value: Any) -> None:
        """For the other ranks: rank 0 announced ``value``; it may do so even after it has left."""
        ...

    def hold_steps(self) -> dict[int, int]:
        """For ranks: for each group, the first step that will not begin before ``switch_at``."""
        ...

    def switch_at(self, config: dict[str, Any], steps: dict[int, int]) -> None:
        """For ranks: use ``config`` from step ``steps[group]`` of each group on."""
        ...
