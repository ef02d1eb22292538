"""Ways to average partitions over all ranks, found by name.

``commsched.transports.<name>`` is a transport if it is listed by :func:`transport_names`: a module or package of that name
that offers ``open_transport(context)``. The other modules here are what transports share.
"""

from __future__ import annotations

import pkgutil

from ..core.errors import ConfigError

#: Modules of this package that transports share, and that are none themselves.
_SHARED = frozenset(
    {
        "aggregator",
        "buffers",
        "choice",
        "collective",
        "context",
        "contributions",
        "host",
        "opening",
        "recast",
        "reduce",
        "stuck",
        "wire",
    }
)


def transport_names() -> list[str]:
    """Names of all transports there are, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)


def require_transport(name: str) -> str:
    """``name``, if it is ``auto`` or there is a transport of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    names = ["auto", *transport_names()]
    if name not in names:
        raise ConfigError(f"transport={name!r} is unknown; there are: {', '.join(names)}")
    return name
