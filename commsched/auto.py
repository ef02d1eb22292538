"""``transport="auto"``: all ranks choose alike."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .core.config import Settings
from .core.errors import ConfigError
from .core.world import World
from .transports.choice import choose, look_around

log = logging.getLogger("commsched")


def transport_name(world: World, settings: Settings, device: str, gather: Callable[[Any], list[Any]]) -> str:
    """The transport that is set or, for ``auto``, chosen. Collective. ``device``: where gradients lie; ``gather``:
    the session's.

    Raises:
        ConfigError: ranks see different things and choose differently; names both choices and why.
    """
    if settings.transport != "auto":
        return settings.transport
    choice = choose(settings, world, look_around(device))
    choices = gather([choice.name, choice.reason])
    name_on_0, reason_on_0 = choices[0]
    for rank, (name, reason) in enumerate(choices):
        if name != name_on_0:
            raise ConfigError(
                f"transport=auto is {name_on_0} on rank 0 ({reason_on_0}) but {name} on rank {rank} ({reason}); set transport"
            )
    if world.rank == 0:
        log.info("%s", choice)
    return choice.name
