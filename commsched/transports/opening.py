"""Opening a transport by its name, with what the settings put around it."""

from __future__ import annotations

from importlib import import_module

from ..core.errors import ConfigError
from ..core.ports import Transport
from . import require_transport
from .context import TransportContext
from .host import open_hierarchy


def open_named(context: TransportContext, name: str) -> Transport:
    """The transport ``name``; around it, if ``settings`` say so, the wire dtype and the hierarchy.

    Collective: every rank of the job calls it, with the same name and settings.

    Raises:
        ConfigError: there is no transport of that name, it lacks a package, or a setting does not fit it.
        CommschedError: what else opening may fail with; see the transport.
    """
    require_transport(name)
    if name == "nccl":  # moves memory of devices, and knows the ways within a host better
        _require_plain(context, name)
        return _open(context, name)
    if name == "mpi":  # also of ranks that leave the network to another of their host
        import_module("commsched.transports.mpi").prepare(context)
    return open_hierarchy(context, lambda network: _open(network, name))


def _open(context: TransportContext, name: str) -> Transport:
    opened: Transport = import_module(f"commsched.transports.{name}").open_transport(context)
    return opened


def _require_plain(context: TransportContext, name: str) -> None:
    settings = context.settings
    if settings.wire != "none":
        raise ConfigError(f"wire={settings.wire!r} does not go with transport={name!r}; it is for memory of the host")
    if settings.hierarchy == "on":
        raise ConfigError(f"hierarchy='on' does not go with transport={name!r}, which has one of its own")
