"""The numbers of a session as Prometheus metrics, which a small HTTP server of each rank shows."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ..control.rendezvous import bracketed
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


#: Limits against strangers: so many requests are answered at a time, and others are refused; a request from which no byte comes
#: for so many seconds is given up.
MOST_REQUESTS, REQUEST_SECONDS = 16, 10.0


def require_library() -> None:
    """Raises ConfigError, with the pip line, if the library for Prometheus is missing."""
    if find_spec("prometheus_client") is None:
        raise ConfigError('metrics needs the Prometheus client: pip install "commsched[metrics]"')


def serve_metrics(address: str, local_rank: int, stats: Callable[[], Mapping[str, Any]]) -> Callable[[], None]:
    """Serve what ``stats`` returns at ``address`` (host:port), at a port that is higher by ``local_rank``. Port 0 is any free
    one. Returns a function that ends it. If nothing can listen there, a warning says so, and training goes on."""
    from prometheus_client import CollectorRegistry, make_wsgi_app

    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    wanted = int(port) + local_rank if int(port) else 0
    registry = CollectorRegistry()
    registry.register(_Collector(stats))
    try:
        family = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0][0]
        server = make_server(host, wanted, make_wsgi_app(registry), _SERVERS[family], _Handler)
    except (OSError, OverflowError, UnicodeError) as error:
        log.warning("no metrics at %s:%d: %s", host, wanted, error)
        return lambda: None
    thread = threading.Thread(target=server.serve_forever, name="commsched-metrics", daemon=True)
    thread.start()
    log.info("metrics are at http://%s:%d/metrics", bracketed(host), server.server_port)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each request, at most :data:`MOST_REQUESTS`."""

    daemon_threads = True
    request_queue_size = 128  # of connections to be accepted, while training has the processors

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there can be no thread
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request for metrics from %s failed", client_address, exc_info=True)


class _ServerOfIPv6(_Server):
    address_family = socket.AF_INET6


_SERVERS = {socket.AF_INET: _Server, socket.AF_INET6: _ServerOfIPv6}


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:
        pass  # requests come every few seconds


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
