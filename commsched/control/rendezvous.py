"""Rendezvous: ranks find rank 0's control channel and the job's token by settings, or on one machine by a private file."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.errors import ConfigError, PeerTimeout
from ..core.world import World
from ..settings import Settings, each_of, parse_address

log = logging.getLogger("commsched")


class Endpoint(NamedTuple):
    """The address of the control channel (port 0: any free port, for rank 0 to bind) and the token that every member must
    prove."""

    address: str
    token: str


def read_token(settings: Settings) -> str | None:
    """The token from the settings, or None if it is not set.

    Raises:
        ConfigError: the token file cannot be read, is empty or no text, or other users may read it.
    """
    if settings.token is not None or settings.token_file is None:
        return settings.token
    path = Path(settings.token_file)
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"token_file={str(path)!r} may be read by other users; chmod 600 it")
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"token_file={str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(
            f"token_file={str(path)!r} is not text: write a token into it, such as openssl rand -hex 32 prints"
        ) from None
    if not token:
        raise ConfigError(f"token_file={str(path)!r} is empty")
    return token


def rendezvous_path(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The rendezvous file of this job on this machine: as set, or named after variables that all ranks of a launcher share."""
    if settings.rendezvous is not None:
        return Path(settings.rendezvous)
    name = str(os.getppid())  # the launcher, if it has started the ranks directly
    for variables in _JOB_IDENTITIES:
        if variables[0] in environ:
            name = "-".join(environ.get(variable, "") for variable in variables).replace("/", "_")
            break
    return Path(tempfile.gettempdir()) / f"commsched-{os.getuid()}" / f"{name}.json"


#: Variables that a launcher sets to the same value in all ranks of a job and to another value in another job. MPICH has none.
_JOB_IDENTITIES = (
    ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("SLURM_STEP_ID", "SLURM_JOB_ID"),
)


def require_strong(token: str, address: str) -> None:
    """Check that a process that can reach ``address``, at which this job will listen, cannot guess the job's token.

    Raises:
        ConfigError: the token is short, and other machines may reach the address.
    """
    require_strong_on([each.rpartition(":")[0] for each in each_of(address)], token, address)


def require_strong_on(hosts: Sequence[str], token: str, said: str) -> None:
    """Check the same of ``hosts``, at any port. The message names them as ``said``."""
    if len(token) < _MIN_TOKEN and not all(map(is_loopback, hosts)):
        raise ConfigError(
            f"the token has {len(token)} of at least {_MIN_TOKEN} characters, and {said} may be reached by other machines: "
            "take one that nobody can guess, such as openssl rand -hex 32 prints"
        )


def _is_any(host: str) -> bool:
    """Whether ``host`` stands for all addresses of the machine that listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether ``host`` is literally "localhost" or a loopback address. Other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


#: Least number of characters of a token that strangers may try to guess.
_MIN_TOKEN = 16


def job_name(world: World, settings: Settings, environ: Mapping[str, str]) -> str:
    """The name of this job: the setting, or the launcher's name for it, or "" if there is neither. It keeps apart the ranks of
    two jobs that have the same token and the same address."""
    variables = _JOB_NAMES.get(world.launcher, ())
    named = bool(variables) and variables[0] in environ
    name = settings.job or ("-".join(environ.get(variable, "") for variable in variables) if named else "")
    return fitting_name(name)


def fitting_name(name: str) -> str:
    """``name``, or something short that stands for it if a handshake has no room for it."""
    return name if len(name.encode()) < 256 else hashlib.sha256(name.encode()).hexdigest()


#: Variables that each launcher sets to the same value in all ranks of a job, on every machine, and to another value in another
#: job. ``commsched run`` needs none, since it makes a token for each job; MPICH has none.
_JOB_NAMES = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
    "mpirun (Open MPI)": ("PMIX_NAMESPACE",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}


def where_to_listen(world: World, settings: Settings) -> Endpoint:
    """The address that rank 0 binds, and the token. If all ranks are on one machine and ``control`` is not set, these are any
    free loopback port and, unless a token is set, a new token.

    Raises:
        ConfigError: the address must be set, because ranks are on several machines, and is not; the address is set without a
            token; the token is short; or the address is a name of rank 0's loopback address, which other machines cannot reach.
    """
    token = read_token(settings)
    if world.one_machine and settings.control is None:
        return Endpoint("127.0.0.1:0", token or secrets.token_hex(32))
    meeting = _given(world, settings, token)
    require_strong(meeting.token, meeting.address)
    if not world.one_machine:
        require_no_loopback(meeting.address.rpartition(":")[0].strip("[]"), f"control={meeting.address!r}")
    return meeting


def require_no_loopback(host: str, said: str) -> None:
    """Check, on rank 0, that ``host`` is not a name of this machine's loopback address, and warn if it is such an address.

    Args:
        said: the setting that holds it, and its value.

    Raises:
        ConfigError: it is such a name, which ranks on other machines cannot reach.
    """
    if is_loopback(host):
        # Not refused: a tunnel may lead there, and several hosts may be emulated on one.
        log.warning("rank 0 listens at %s, by %s, which ranks on other machines cannot reach", host, said)
    elif stands_for_loopback(host):
        raise ConfigError(
            f"{said}: on rank 0's machine the name {host} stands for a loopback address (see /etc/hosts), "
            "which ranks on other machines cannot reach; set rank 0's address instead of the name"
        )


def publish(path: Path, meeting: Endpoint) -> None:
    """Write the rendezvous file, which tells the ranks of this machine, but no other user, where rank 0 listens.

    Raises:
        ConfigError: the directory belongs to another user, other users may write to it, or it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(path.parent)
        process = {"pid": os.getpid(), "started": _started(os.getpid())}
        descriptor, draft = tempfile.mkstemp(dir=path.parent)  # made with mode 0600
        try:
            with open(descriptor, "w") as file:
                json.dump({"address": meeting.address, "token": meeting.token, **process}, file)
            os.replace(draft, path)
        except BaseException:  # for example, the disk is full
            os.unlink(draft)
            raise
    except OSError as error:
        raise ConfigError(f"the rendezvous file {path} cannot be written: {error.strerror}") from error


def find(world: World, settings: Settings, path: Path) -> Endpoint:
    """Find rank 0's endpoint, on another rank: wait until rank 0 has published it, or take it from the settings.

    A file left behind by an earlier job is ignored, and so is a file that cannot be read: rank 0 of this job replaces it.

    Raises:
        PeerTimeout: rank 0 published nothing within ``join_within``.
        ConfigError: the address or the token is missing from the settings, or the address is not that of one machine; other
            users may write to the file's directory; or the file cannot be read, and was not replaced.
    """
    if not world.one_machine or settings.control is not None:
        given = _given(world, settings, read_token(settings))
        host, _, port = given.address.rpartition(":")
        if int(port) == 0 or (_is_any(host) and not world.one_machine):
            raise ConfigError(
                f"control={given.address!r}: rank {world.rank} cannot find rank 0 there; give the address of rank 0's machine, "
                "and a port"
            )
        return given
    deadline = time.monotonic() + settings.join_within
    unreadable: Exception | None = None
    while time.monotonic() < deadline:
        if os.path.isdir(path.parent):
            _require_private(path.parent)
        try:
            found, unreadable = _read(path), None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            found, unreadable = None, error
        if found is not None:
            return found._replace(token=read_token(settings) or found.token)
        time.sleep(0.02)  # polls only while joining: nothing can notify us yet
    if unreadable is not None:
        raise ConfigError(f"the rendezvous file {path} cannot be read ({unreadable}); remove it") from unreadable
    raise PeerTimeout(
        f"rank {world.rank} waited {settings.join_within:g} s for rank 0 to say where it listens, in {path}; if the launcher "
        "does not start Python directly, set COMMSCHED_RENDEZVOUS to one file name, new for each job, on every rank"
    )


def _read(path: Path) -> Endpoint | None:
    """The endpoint in the file; None if there is no file, or if it is from an earlier job or session. A file that is not one of
    ours may raise any of the exceptions that ``find`` catches."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)  # the directory may have been another one a moment ago
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise ValueError("it is not a file that only this user can write")
        with open(descriptor, closefd=False) as file:
            found = json.load(file)
    finally:
        os.close(descriptor)
    meeting = Endpoint(parse_address(found["address"]), str(found["token"]))
    if _started(int(found["pid"])) != int(found["started"]):
        return None
    return meeting if is_listening(meeting.address) else None  # the file is from an earlier session of that process


def is_listening(address: str) -> bool:
    """Whether a process accepts connections at ``address``, and this one reaches it within a second."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _started(pid: int) -> int | None:
    """The time at which a process started, in the system's ticks; None if it has ended. A process number may be reused, but not
    with the same time."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in ("Z", "X") else int(rest[18])
    except (OSError, ValueError, IndexError):
        return None


def own_host(settings: Settings, control_address: str) -> str:
    """The address, without port or brackets, at which other ranks reach this one: the first of the setting, or the address from
    which this rank reaches rank 0. The latter is a loopback address if rank 0 listens at one.

    Raises:
        ConfigError: rank 0's host was not found within ``join_within``, or this rank reaches it from a link-local address only.
    """
    if settings.hosts:
        return settings.hosts[0]
    control_host, port = control_address.rsplit(":", 1)
    deadline = time.monotonic() + settings.join_within
    while True:
        try:
            found = socket.getaddrinfo(control_host.strip("[]"), int(port) or 1, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, where = found[0]
            with socket.socket(family, kind, protocol) as probe:  # sends nothing: only asks for the route
                probe.connect(where)
                own = str(probe.getsockname()[0])
            break
        except (OSError, UnicodeError) as error:  # UnicodeError: a name with an empty part
            if time.monotonic() >= deadline:
                why = getattr(error, "strerror", None) or error
                raise ConfigError(f"control={control_address!r} cannot be reached: {why}") from error
        time.sleep(0.2)  # polls only while joining: names and routes may come up late
    if ipaddress.ip_address(own).is_link_local and ":" in own:
        raise ConfigError(
            f"this rank reaches control={control_address!r} from {own}, a link-local address, which needs the name of a "
            "network card on each host: let control be another address of rank 0's host, or set COMMSCHED_HOST on every rank"
        )
    return own


def bracketed(host: str) -> str:
    """``host`` as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def stands_for_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, resolves to a loopback address on this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(is_loopback(str(where[4][0])) for where in found)


class Reached(NamedTuple):
    """The address of one rank, according to that rank.

    ``host``: the address at which others reach it. ``loopback``: whether this is a loopback address. ``machine``: equal for
    processes that share a loopback interface."""

    host: str
    loopback: bool
    machine: str


def reached_at(host: str) -> Reached:
    """The record of this process, which others reach at ``host``."""
    return Reached(host, stands_for_loopback(host), _machine())


def _machine() -> str:
    try:
        # The network namespace is included because containers on one machine may have networks of their own.
        return f"{_BOOT.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


_BOOT = Path("/proc/sys/kernel/random/boot_id")


def require_reachable(ranks: Sequence[Reached]) -> None:
    """Check the addresses of all ranks, before any rank tries to reach another.

    Raises:
        ConfigError: one rank has a loopback address, and another rank is on another machine or in another network namespace;
            names both.
    """
    if len({one.machine for one in ranks}) == 1:
        return
    for rank, one in enumerate(ranks):
        elsewhere = next((other for other, its in enumerate(ranks) if its.machine != one.machine), None)
        if one.loopback and elsewhere is not None:
            cure = "control to an address of rank 0 that they reach" if rank == 0 else "COMMSCHED_HOST to its address there"
            raise ConfigError(
                f"rank {rank} would be reached at {one.host}, but rank {elsewhere} is on another machine or in another network "
                f"namespace, where that is another address: set {cure}"
            )


def _given(world: World, settings: Settings, token: str | None) -> Endpoint:
    if settings.control is None:
        raise ConfigError(
            f"{world.world_size} ranks on several machines ({world.launcher}): set COMMSCHED_CONTROL=host:port, where rank 0 "
            "is to listen, and the same COMMSCHED_TOKEN on every rank"
        )
    if token is None:
        raise ConfigError("control is set, but no token: set the same COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE on every rank")
    return Endpoint(settings.control, token)


def _require_private(directory: Path) -> None:
    link, status = directory.lstat(), directory.stat()
    if link.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"{directory} is another user's; set COMMSCHED_RENDEZVOUS to a file in a directory of yours")
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{directory} may be written by other users; set COMMSCHED_RENDEZVOUS to a file in a directory of yours"
        )
