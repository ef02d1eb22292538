"""Ways to average partitions over all ranks.

backends/    one module for each transport, found by its name
averaging/   the averaging code that a parameter server's shard and a host's leader share
collective/  the code that all transports over a library of collectives share
hierarchy/   the ranks of a host sum in shared memory, and one of them uses the network
wire         16-bit gradients on the network, around any transport
"""

from __future__ import annotations

import pkgutil

from ..settings import require_one_of
from . import backends


def transport_names() -> list[str]:
    """Names of all available transports, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(backends.__path__))


def require_transport(name: str) -> str:
    """Return ``name`` if it is ``auto`` or the name of a transport.

    Raises:
        ConfigError: no transport has that name; the message lists the available transports.
    """
    return require_one_of(["auto", *transport_names()], name, "transport")
