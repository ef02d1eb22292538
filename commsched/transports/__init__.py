"""Ways to average partitions over all ranks.

backends/    one module for each transport, found by its name
averaging/   the averaging code that a parameter server's shard and a host's leader share
collective/  the code that all transports over a library of collectives share
hierarchy/   the ranks of a host sum in shared memory, and one of them uses the network
wire         16-bit gradients on the network, around any transport
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..settings import Settings, require_one_of
from . import backends
from .backend import Backend

#: Transports that no job of several processes can have.
FOR_TESTS = frozenset({"local"})


def transport_names() -> list[str]:
    """Names of all available transports, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(backends.__path__))


def require_transport(name: str) -> str:
    """Return ``name`` if it is ``auto`` or the name of a transport.

    Raises:
        ConfigError: no transport has that name; the message lists the available transports, but those for tests.
    """
    names = ["auto", *transport_names()]
    return name if name in names else require_one_of([each for each in names if each not in FOR_TESTS], name, "transport")


def load_backend(name: str) -> Backend:
    """Load the transport ``name``, which is the name of a module in ``backends``. Its library is not imported before the
    transport opens."""
    backend: Backend = import_module(f"{backends.__name__}.{name}").BACKEND
    return backend


def without_effect(settings: Settings, transport: str) -> dict[str, str]:
    """The settings that the user changed from their defaults and that have no effect with ``transport``, each with a sentence
    that says so."""
    used = load_backend(transport).settings
    changed = {name: value for name, value in settings.changed("some_transports").items() if name not in used}
    problems = {
        name: f"transport={transport} cannot encrypt, so security={settings.security!r} is refused: take transport=ps, or a "
        "network that encrypts, such as WireGuard (docs/security.md), with security='none'"
        if name == "security"
        else f"{settings.text_of(name)} has no effect with transport={transport}: it is for {', '.join(users_of(name))}"
        for name in changed
    }
    if len(settings.hosts) > 1 and "flows" not in used:
        problems["host"] = (
            f"{settings.text_of('host')} is several addresses, and transport={transport} uses one: several are for "
            f"{', '.join(users_of('flows'))}"
        )
    return problems


def users_of(setting: str) -> list[str]:
    """The transports that use ``setting``, one of the settings for some transports only."""
    return [name for name in transport_names() if setting in load_backend(name).settings]
