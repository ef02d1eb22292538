"""Shard: a parameter server that listens, in a rank's process or in a process of its own."""

from __future__ import annotations

from dataclasses import replace

from .service import Service, ServiceContext
from .stream import StreamOptions, open_port


class Shard:
    """A port around a :class:`Service`. It listens from construction on.

    Args:
        address: ``host:port`` to listen at; port 0 means any free port.
        options: the options of its streams; the lane is the same as the workers'.
        context: the arguments of the service. The address is added to the name.

    Raises:
        ConfigError: the shard cannot listen at the address, or the token is empty.
    """

    def __init__(self, address: str, options: StreamOptions, context: ServiceContext) -> None:
        self._port = open_port(address, options)
        #: ``host:port`` as bound.
        self.address = self._port.address
        #: Handles the messages of this server. A rank in the same process calls it directly.
        self.service = Service(replace(context, name=f"{context.name} at {self.address}"))
        self._port.serve(self.service.serve)

    def close(self, graceful: bool = True) -> None:
        """Say goodbye to the workers that are still connected, and release the port and all threads. Idempotent."""
        self.service.close()
        self._port.close(graceful)
