"""Opens a transport by its name, inside the wrappers that the settings ask for."""

from __future__ import annotations

from importlib import import_module

from ..core.errors import ConfigError
from ..core.interfaces import Transport
from . import require_transport
from .context import TransportContext
from .hierarchy import open_hierarchy


def open_named(context: TransportContext, name: str) -> Transport:
    """Open the transport ``name``, inside the wire dtype and the hierarchy if ``settings`` ask for them.

    Collective: every rank of the job calls it, with the same name and settings.

    Raises:
        ConfigError: no transport has that name, the transport lacks a package, or a setting does not fit it.
        CommschedError: opening failed for another reason; see the transport.
    """
    require_transport(name)
    if name == "nccl":  # it moves device memory, and uses the links within a host better than the hierarchy
        _require_plain(context, name)
        return _open(context, name)
    if name == "mpi":  # also on ranks whose leader uses the network for them
        import_module("commsched.transports.backends.mpi").prepare(context)
    return open_hierarchy(context, lambda network: _open(network, name))


def _open(context: TransportContext, name: str) -> Transport:
    opened: Transport = import_module(f"commsched.transports.backends.{name}").open_transport(context)
    return opened


def _require_plain(context: TransportContext, name: str) -> None:
    settings = context.settings
    if settings.wire != "none":
        raise ConfigError(f"wire={settings.wire!r} does not go with transport={name!r}; it is for memory of the host")
    if settings.hierarchy == "on":
        raise ConfigError(f"hierarchy='on' does not go with transport={name!r}, which has one of its own")
