"""The rates of a job's network, measured before training. Runs in each rank's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from commsched.control.rendezvous import own_host
from commsched.settings import Settings

from .link_rate import MIN_BYTES, UNSHAPED_BYTES, measure_flows, payload_share

if TYPE_CHECKING:
    from commsched.session.session import Session

_LINK_SECONDS = 0.5
_MESSAGE_SECONDS = 0.05  # transfer time of the bytes that measure the cost of messages
_MESSAGE_BYTES = (1_000_000, 16_000_000)


@dataclass(frozen=True)
class Network:
    """The rates of the network, the same on every rank. A rate is the payload in bytes per second of a host's link, for every
    system.

    Separate servers take no part in the measurement. Their rates are inferred from the workers' rates, because all links are
    made alike.
    """

    worker_rates: list[float]
    server_rates: list[float]

    @property
    def message_bytes(self) -> int:
        """Number of bytes to send when measuring the cost of messages."""
        least, most = _MESSAGE_BYTES
        return max(least, min(most, round(_MESSAGE_SECONDS * min(self.worker_rates + self.server_rates))))


def own_address() -> str:
    """The address at which the other ranks reach this one."""
    job = Settings.load({}, os.environ)
    return "127.0.0.1" if job.control is None else own_host(job, job.control)


def measure_network(session: Session, host: str, nominal_rates: Sequence[float] | None, servers: int, capped: bool) -> Network:
    """Measure the rates of the network. Collective.

    Args:
        host: the address at which the others reach this rank.
        nominal_rates: configured rate of each host's link in bytes per second, workers before servers; None means not shaped.
        capped: whether the transport itself keeps to these rates, on a faster network.
    """
    if capped and nominal_rates:
        rates = list(nominal_rates)
    else:
        rates = _host_rates(session, host, nominal_rates, servers)
    return Network(rates[: session.world_size], rates[session.world_size :])


def _host_rates(session: Session, host: str, nominal: Sequence[float] | None, servers: int) -> list[float]:
    if nominal is None:
        return [median(measure_flows(session, host, UNSHAPED_BYTES))] * (session.world_size + servers)
    flows = measure_flows(session, host, max(MIN_BYTES, round(_LINK_SECONDS * min(nominal))))
    share = payload_share(flows, nominal[: session.world_size])
    return [share * rate for rate in nominal]
