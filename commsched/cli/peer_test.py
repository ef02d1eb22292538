"""``commsched doctor --listen`` and ``--peer``: two machines join a job of two ranks over the parameter server, and measure.

The job is a real one, so it needs what training needs: the control channel with the token, and a connection from each machine
to the other's shard.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from statistics import median

from ..control.rendezvous import own_host, read_token, require_strong
from ..core.errors import ConfigError, PeerTimeout
from ..core.manifest import Manifest, TensorSpec
from ..core.standard_streams import say_out
from ..core.world import World
from ..net.rpc import listen
from ..net.tls import identity_of
from ..session.opening import open_session
from ..session.session import Session
from ..settings import Settings, parse_address
from ..tuner.link import describe_link
from .doctor import address_towards_the_world

#: The port of ``--listen`` without one, and the seconds for which it waits for the other machine.
PORT = 29600
LISTEN_SECONDS = 600.0

#: The seconds in which ``--peer`` must reach the machine that listens.
CONNECT_SECONDS = 5.0

#: Bytes of the first transfer, and the seconds that the second one is to take.
_FIRST_BYTES = 4_000_000
_SECONDS = 2.0
_MOST_BYTES = 1_000_000_000
_ROUND_TRIPS = 20
_LAUNCHER = "commsched doctor"


def await_peer(address: str, environ: Mapping[str, str]) -> int:
    """Wait at ``address`` (empty: this machine's, :data:`PORT`) for the other machine, and measure. Returns 0.

    Raises:
        CommschedError: this machine cannot listen there, no machine came, or it could not be reached.
    """
    where = parse_address(address or f"{address_towards_the_world()}:{PORT}", "--listen")
    settings = Settings.load({}, environ)
    token = read_token(settings)
    if token is None:
        token = secrets.token_hex(32)
        shown = token
    else:
        shown = "(the same token)"
    require_strong(token, where)
    identity_of(settings.security, token, settings.certificates)
    listen(where).close()  # what cannot work is said before the line for the other machine
    if settings.security != "none":
        shown += f" COMMSCHED_SECURITY={settings.security}"
    say_out(f"listening on {where}; on the other machine: COMMSCHED_TOKEN={shown} commsched doctor --peer {where}")
    return _measure(0, where, token, LISTEN_SECONDS, settings)


def join_peer(address: str, environ: Mapping[str, str]) -> int:
    """Join the machine that listens at ``address``, and measure. Returns 0.

    Raises:
        CommschedError: it does not listen there, has another token, or cannot reach this machine.
    """
    where = parse_address(address, "--peer")
    settings = Settings.load({}, environ)
    if (token := read_token(settings)) is None:
        raise ConfigError("set COMMSCHED_TOKEN to the token that commsched doctor --listen printed on the other machine")
    _require_listener(where)
    return _measure(1, where, token, None, settings)


def _require_listener(where: str) -> None:
    """Raises PeerTimeout after :data:`CONNECT_SECONDS` if nothing listens there. The control channel would try for longer, as a
    job's rank 0 may come later."""
    host, _, port = where.rpartition(":")
    until = time.monotonic() + CONNECT_SECONDS
    try:
        while True:
            try:
                return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
            except ConnectionRefusedError:  # the other one may have just printed its line
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)  # nothing could tell us
    except OSError as error:
        why = "no answer, as if a firewall drops it" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise PeerTimeout(
            f"nothing can be reached at {where}: {why}; start commsched doctor --listen {where} on that machine first, and "
            "look whether a firewall lets its port through"
        ) from error


def _measure(rank: int, where: str, token: str, join_within: float | None, users: Settings) -> int:
    used: dict[str, object] = {name: getattr(users, name) for name in _USED if name in users.given}
    settings = Settings.load({**_FIXED, **used, "control": where, "token": token, "join_within": join_within}, {})
    with open_session(World(rank, 2, 0, 1, _LAUNCHER), settings) as session:
        host = own_host(settings, where)
        there = session.gather([host, describe_link(host)], "to be examined")[1 - rank]
        say_out(f"control channel: joined, both ends have proved the token; {there[0]} ({there[1]}) is the other machine")
        trip = session.gather(_round_trip(session))[1]  # rank 0 answers itself
        say_out(f"control channel: {1e3 * trip:.2f} ms for a round trip")
        say_out(f"this machine is reached at {host} ({describe_link(host)}), and reaches the other one's shard")
        first = _rate(session, _FIRST_BYTES)
        nbytes = min(_MOST_BYTES, max(_FIRST_BYTES, round(_SECONDS * first)))
        rate = _rate(session, session.gather(nbytes)[0])
        say_out(f"gradients: {rate / 1e6:.4g} MB/s, both ways at the same time ({8 * rate / 1e9:.3g} Gbit/s in each direction)")
        return 0


#: Settings of the test, and those of the user's that count for it beside them.
_FIXED = {
    "transport": "ps",
    "hierarchy": "off",
    "partition": "1MB",
    "credit": "8MB",
    "log": "warning",
}
_USED = ("host", "lane", "fail_after", "security", "certificates")


def _round_trip(session: Session) -> float:
    times = []
    for _ in range(_ROUND_TRIPS):
        began = time.perf_counter()
        session.gather(None)
        times.append(time.perf_counter() - began)
    return median(times)


def _rate(session: Session, nbytes: int) -> float:
    """Bytes per second and direction while ``nbytes`` are averaged: each machine sends half of them as contributions and half
    as averages, and receives as many. The slower machine counts."""
    spec = TensorSpec("commsched.doctor", (nbytes // 4,), "float32")
    buffer = memoryview(bytearray(spec.nbytes))
    group = session.register(Manifest((spec,)), {"float32": buffer})
    group.begin_step()
    session.gather(None)  # both begin together
    began = time.perf_counter()
    group.notify_ready(0)
    group.proxies[0].wait()
    seconds = time.perf_counter() - began
    group.release()
    return spec.nbytes / float(max(session.gather(seconds)))
