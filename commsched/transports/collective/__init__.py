"""Code that transports over collectives share: the verbs, on top of a backend's sum and point-to-point messages.

gloo and MPI offer communicators as :class:`~.channel.Channel`, and :class:`~.transport.CollectiveTransport` makes a transport
of them. NCCL has a transport of its own, which uses only the order check and the failure handling of this package.
"""

from __future__ import annotations

from .channel import Channel, Done
from .transport import CollectiveTransport

__all__ = ["COLLECTIVE_SETTINGS", "Channel", "CollectiveTransport", "Done"]

#: The settings for some transports only (see ``Backend``) that have an effect with every :class:`CollectiveTransport`.
COLLECTIVE_SETTINGS = frozenset({"order", "collective", "wire", "hierarchy"})
