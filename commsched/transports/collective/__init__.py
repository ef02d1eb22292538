"""What all transports over collectives share: the verbs on top of one backend's sum and point-to-point messages.

A backend (gloo, MPI, NCCL) offers communicators as :class:`~.channel.Channel`; :class:`~.transport.CollectiveTransport` makes a
transport of them.
"""

from __future__ import annotations

from .channel import Channel, Done
from .transport import CollectiveTransport

__all__ = ["Channel", "CollectiveTransport", "Done"]
