"""What a transport is given when it opens. Each transport module defines ``open_transport(context) -> Transport``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.config import Settings
from ..core.errors import CommschedError
from ..core.ports import OnFailure
from ..core.world import World


@dataclass(frozen=True, slots=True)
class TransportContext:
    """``gather(value)`` returns the JSON value of every rank in rank order. ``host`` is the address, without port, that
    the other ranks reach this one at; ``control_address`` is where rank 0's control channel listens. ``when_failed(callback)``
    lets a transport that waits for others while it opens hear that the job has failed."""

    world: World
    settings: Settings
    host: str
    token: str
    control_address: str
    gather: Callable[[Any], list[Any]]
    on_failure: OnFailure
    when_failed: Callable[[Callable[[CommschedError], None]], None]
