"""The links that ``python -m bench train`` asks for, and a check whether this machine can shape them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commsched import ConfigError
from commsched.settings import parse_rate

from .cluster import Cluster, ClusterUnavailable
from .processes import JobFailed


@dataclass(frozen=True)
class Links:
    """The hosts' links. ``rates`` are in bytes per second, workers before servers; None means not shaped."""

    workers: int
    servers: int
    texts: tuple[str, ...]
    rates: list[float] | None

    @classmethod
    def of(cls, workers: int, servers: int, bandwidth: str | None) -> Links:
        """
        Args:
            bandwidth: one rate, or one rate for each host, separated by commas; None means not shaped.

        Raises:
            ConfigError: the number of rates is neither 1 nor the number of hosts, or a rate is invalid.
        """
        if bandwidth is None:
            return cls(workers, servers, (), None)
        texts, hosts = tuple(bandwidth.split(",")), workers + servers
        if len(texts) not in (1, hosts):
            raise ConfigError(
                f"bandwidth={bandwidth}: {len(texts)} rates, but there are {hosts} hosts, {workers} workers and "
                f"{servers} servers; give one, or one for each"
            )
        rates = [parse_rate(text, "bandwidth") for text in texts]
        return cls(workers, servers, texts, rates * hosts if len(rates) == 1 else rates)

    def __str__(self) -> str:
        return ",".join(self.texts) or "loopback"

    @property
    def equal(self) -> bool:
        return len(self.texts) < 2

    def require_as_planned(self, link: str, why_not: str | None) -> None:
        """Raise JobFailed unless ``link``, the network of a job, was shaped as planned. ``why_not`` is the result of
        :func:`why_not_shaped` from before the job."""
        if self.rates is not None and why_not is None and not link.endswith((" tbf", " htb")):
            raise JobFailed(f"links were to be shaped, and could be a moment before, but the link was {link}")

    def for_job(self) -> str | dict[str, str] | None:
        """The value of ``Job.bandwidth``: None, one rate, or one rate for each host by its name."""
        if self.equal:
            return self.texts[0] if self.texts else None
        hosts = [f"worker{rank}" for rank in range(self.workers)] + [f"server{index}" for index in range(self.servers)]
        return dict(zip(hosts, self.texts, strict=True))


def why_not_shaped(links: Links) -> str | None:
    """The reason why this machine cannot shape ``links``; None if it can or need not.

    Raises:
        ConfigError: links cannot be shaped, but must be, because they differ.
    """
    if links.rates is None:
        return None
    try:
        with Cluster(["probe"], "1gbit"):
            return None
    except ClusterUnavailable as error:
        reason = str(error)
    if not links.equal:
        raise ConfigError(f"bandwidth={links}: links can differ only where they are shaped, but {reason}")
    return reason


def require_capped(links: Links, why_not: str | None, uncapped: Sequence[str]) -> None:
    """Check that no system would use the whole network beside others that limit their rate.

    Args:
        why_not: the result of :func:`why_not_shaped`.
        uncapped: names of the systems that cannot limit their rate.

    Raises:
        ConfigError: there is such a system, and links cannot be shaped.
    """
    if why_not is not None and uncapped:
        raise ConfigError(
            f"systems: {uncapped[0]} would use the whole network while commsched's transport limits its rate to "
            f"{links}, so their times could not be compared; links have to be shaped, but {why_not}"
        )
