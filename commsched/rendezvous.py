"""How ranks find rank 0's control channel and the job's token: by settings, or on one machine through a private file."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .core.config import Settings
from .core.errors import ConfigError, PeerTimeout
from .core.world import World


class Meeting(NamedTuple):
    """Where the control channel is (port 0: any free one, for rank 0 to bind) and the token everybody must show."""

    address: str
    token: str


def read_token(settings: Settings) -> str | None:
    """The token of the settings.

    Raises:
        ConfigError: the token file cannot be read, is empty, or other users may read it.
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
    if not token:
        raise ConfigError(f"token_file={str(path)!r} is empty")
    return token


def rendezvous_path(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The file of this job on this machine: the one set, or one named after what all ranks of a launcher share."""
    if settings.rendezvous is not None:
        return Path(settings.rendezvous)
    name = str(os.getppid())  # the launcher, if it has started the ranks directly
    for variables in _JOB_IDENTITIES:
        if variables[0] in environ:
            name = "-".join(environ.get(variable, "") for variable in variables).replace("/", "_")
            break
    return Path(tempfile.gettempdir()) / f"commsched-{os.getuid()}" / f"{name}.json"


#: What launchers set to the same in all ranks of a job and to something else in another job; MPICH sets no such thing.
_JOB_IDENTITIES = (
    ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("SLURM_STEP_ID", "SLURM_JOB_ID"),
)


def where_to_listen(world: World, settings: Settings) -> Meeting:
    """For rank 0: the address to bind, and the token; a new one if every rank is on this machine.

    Raises:
        ConfigError: ranks are on several machines, and the address or the token is not set.
    """
    token = read_token(settings)
    if world.one_machine and settings.control is None:
        return Meeting("127.0.0.1:0", token or secrets.token_hex(32))
    return _given(world, settings, token)


def publish(path: Path, meeting: Meeting) -> None:
    """Tell the ranks of this machine, and no other user, where rank 0 listens.

    Raises:
        ConfigError: the directory belongs to somebody else or cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(path.parent)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # made with mode 0600
            json.dump({"address": meeting.address, "token": meeting.token, "pid": os.getpid()}, file)
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"the rendezvous file {path} cannot be written: {error.strerror}") from error


def find(world: World, settings: Settings, path: Path) -> Meeting:
    """For the other ranks: wait until rank 0 has published, or take what is set.

    Raises:
        PeerTimeout: rank 0 published nothing within ``join_within``.
        ConfigError: as for :func:`where_to_listen`.
    """
    if not world.one_machine or settings.control is not None:
        return _given(world, settings, read_token(settings))
    deadline = time.monotonic() + settings.join_within
    while time.monotonic() < deadline:
        found = _read(path)
        if found is not None and _alive(found["pid"]):
            return Meeting(found["address"], read_token(settings) or found["token"])
        time.sleep(0.02)  # only while joining: there is nobody yet who could tell us
    raise PeerTimeout(
        f"rank {world.rank} waited {settings.join_within:g} s for rank 0 to say where it listens, in {path}; if the launcher "
        "does not start Python directly, set COMMSCHED_RENDEZVOUS to one file name, new for each job, on every rank"
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        _require_private(path.parent)
        found = json.loads(path.read_text())
        return {"address": str(found["address"]), "token": str(found["token"]), "pid": int(found["pid"])}
    except FileNotFoundError:
        return None
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the rendezvous file {path} cannot be read ({error}); remove it") from error


def own_host(world: World, settings: Settings, control_address: str) -> str:
    """The address, without port or brackets, that other ranks reach this one at: the one from which it reaches rank 0, so
    loopback if rank 0 listens there.

    Raises:
        ConfigError: rank 0's host was not found within ``join_within``.
    """
    if settings.host is not None:
        return settings.host.strip("[]")
    control_host, port = control_address.rsplit(":", 1)
    deadline = time.monotonic() + settings.join_within
    while True:
        try:
            found = socket.getaddrinfo(control_host.strip("[]"), int(port) or 1, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, where = found[0]
            with socket.socket(family, kind, protocol) as probe:  # sends nothing: asks for the route only
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(f"control={control_address!r} cannot be reached: {error.strerror or error}") from error
        time.sleep(0.2)  # only while joining: names and routes may come late


def _given(world: World, settings: Settings, token: str | None) -> Meeting:
    if settings.control is None:
        raise ConfigError(
            f"{world.world_size} ranks on several machines ({world.launcher}): set COMMSCHED_CONTROL=host:port, where rank 0 "
            "is to listen, and the same COMMSCHED_TOKEN on every rank"
        )
    if token is None:
        raise ConfigError("control is set, but no token: set the same COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE on every rank")
    return Meeting(settings.control, token)


def _require_private(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{directory} may be written by other users; set COMMSCHED_RENDEZVOUS to a file in a directory of yours"
        )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
