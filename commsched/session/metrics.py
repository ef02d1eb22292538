"""The numbers of a session as Prometheus metrics, which a small HTTP server of each rank shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from ..core.errors import ConfigError

log = logging.getLogger("commsched")

#: By name in ``Session.stats``: what it is, in the words of Prometheus' help.
GAUGES = {
    "steps": "Steps that have begun",
    "step_seconds": "Median time of the last steps",
    "compute_seconds": "Median time of a step in which this rank does not wait for averages",
    "exposed_seconds": "Median time of a step in which this rank waits for averages",
    "gradient_bytes": "Gradients of a step",
    "partition_bytes": "Largest partition in use",
    "credit_bytes": "Credit in use",
    "late_seconds": "Time of a step in which ranks wait for the slowest rank",
    "network_bytes_per_second": "Gradients that the network averages",
    "bound_seconds": "Least time of a step with this model and this network",
}


def require_library() -> None:
    """Raises ConfigError, with the pip line, if the library for Prometheus is missing."""
    if find_spec("prometheus_client") is None:
        raise ConfigError('metrics needs the Prometheus client: pip install "commsched[metrics]"')


def serve_metrics(address: str, local_rank: int, stats: Callable[[], Mapping[str, Any]]) -> Callable[[], None]:
    """Serve what ``stats`` returns at ``address`` (host:port), at a port that is higher by ``local_rank``. Port 0 is any free
    one. Returns a function that ends it. If nothing can listen there, a warning says so, and training goes on."""
    from prometheus_client import CollectorRegistry, start_http_server

    host, _, port = address.rpartition(":")
    wanted = int(port) + local_rank if int(port) else 0
    registry = CollectorRegistry()
    registry.register(_Collector(stats))
    try:
        server, thread = start_http_server(wanted, host.strip("[]"), registry)
    except (OSError, OverflowError, UnicodeError) as error:
        log.warning("no metrics at %s:%d: %s", host, wanted, error)
        return lambda: None
    thread.name = "commsched-metrics"
    log.info("metrics are at http://%s:%d/metrics", host, server.server_port)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


class _Collector:
    """Asks for the numbers each time when Prometheus does, so that steps cost nothing more."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._stats = stats

    def describe(self) -> list[Any]:
        return []  # else the registry would ask for the numbers at once

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        stats = self._stats()
        for name, text in GAUGES.items():
            family = GaugeMetricFamily(f"commsched_{name}", text, labels=["rank"])
            if stats[name] is not None:
                family.add_metric([str(stats["rank"])], stats[name])
            yield family
