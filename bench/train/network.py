"""What the network of a job is like, measured before anything trains. In each rank's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from commsched.core.config import Settings
from commsched.core.world import detect_world
from commsched.rendezvous import own_host

from .link_rate import LEAST_BYTES, UNSHAPED_BYTES, measure_flows, payload_share

if TYPE_CHECKING:
    from commsched.session import Session

_LINK_SECONDS = 0.5
_MESSAGE_SECONDS = 0.05  # of bytes, to learn what messages cost
_MESSAGE_BYTES = (1_000_000, 16_000_000)


@dataclass(frozen=True)
class Network:
    """The same on every rank. Rates are bytes of payload per second of each host's link, whatever uses it.

    Separate servers take no part in measuring: theirs are what the workers' say of links that were made alike.
    """

    worker_rates: list[float]
    server_rates: list[float]

    @property
    def message_bytes(self) -> int:
        """So many are sent to learn what messages cost."""
        least, most = _MESSAGE_BYTES
        return max(least, min(most, round(_MESSAGE_SECONDS * min(self.worker_rates + self.server_rates))))


def own_address() -> str:
    """The address at which the other ranks reach this one."""
    job = Settings.load({}, os.environ)
    return "127.0.0.1" if job.control is None else own_host(detect_world(os.environ), job, job.control)


def measure_network(session: Session, host: str, nominal_rates: Sequence[float] | None, servers: int, capped: bool) -> Network:
    """Collective.

    Args:
        host: the address at which the others reach this rank.
        nominal_rates: bytes per second that each host's link was given, workers before servers; None: not shaped.
        capped: the transport itself keeps to them, on a network that is faster.
    """
    if capped and nominal_rates:
        rates = list(nominal_rates)
    else:
        rates = _host_rates(session, host, nominal_rates, servers)
    return Network(rates[: session.world_size], rates[session.world_size :])


def _host_rates(session: Session, host: str, nominal: Sequence[float] | None, servers: int) -> list[float]:
    if nominal is None:
        return [median(measure_flows(session, host, UNSHAPED_BYTES))] * (session.world_size + servers)
    flows = measure_flows(session, host, max(LEAST_BYTES, round(_LINK_SECONDS * min(nominal))))
    share = payload_share(flows, nominal[: session.world_size])
    return [share * rate for rate in nominal]
