"""Opens a transport by its name, inside the wrappers that the settings ask for."""

from __future__ import annotations

from ..core.interfaces import Transport
from . import load_backend, require_transport
from .backend import TransportContext
from .hierarchy import open_flat, open_hierarchy


def open_named(context: TransportContext, name: str) -> Transport:
    """Open the transport ``name``, inside the wire dtype and the hierarchy if ``settings`` ask for them.

    Collective: every rank of the job calls it, with the same name and settings.

    Raises:
        ConfigError: no transport has that name, the transport lacks a package, or a setting does not fit it.
        CommschedError: opening failed for another reason; see the transport.
    """
    require_transport(name)
    backend = load_backend(name)
    backend.prepare(context)
    return (open_hierarchy if "hierarchy" in backend.settings else open_flat)(context, backend.open)
