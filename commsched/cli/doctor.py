"""``commsched doctor``: what commsched finds on this machine, and what is missing for what."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from ..control.rendezvous import own_host, read_token, require_strong, require_strong_on
from ..core.errors import CommschedError, ConfigError, error_text
from ..core.ports import given_out
from ..core.standard_streams import say_result
from ..net.tls import identity_of
from ..settings import Settings
from ..transports import FOR_TESTS, load_backend, require_transport, transport_names, without_effect
from ..tuner.link import describe_interfaces, describe_link
from ..version import __version__

#: By module: the name of an engine or library that works with commsched, its package, and the extra that installs it.
_ENGINES = {
    "torch": ("PyTorch", "torch", "torch"),
    "accelerate": ("Accelerate", "accelerate", "accelerate"),
    "transformers": ("Transformers", "transformers", "transformers"),
    "lightning": ("Lightning", "lightning", "lightning"),
    "tensorflow": ("TensorFlow", "tensorflow", "tensorflow"),
    "jax": ("JAX", "jax", "jax"),
    "mxnet": ("MXNet", "mxnet", "mxnet"),
    "ray": ("Ray", "ray", "ray"),
    "skopt": ("scikit-optimize", "scikit-optimize", "tune"),
    "prometheus_client": ("Prometheus", "prometheus-client", "metrics"),
    "cryptography": ("cryptography", "cryptography", "tls"),
}

_REQUIRED = ("numpy", "grpcio", "xxhash")


def examine(environ: Mapping[str, str]) -> int:
    """Print the facts. Returns 1 if the settings in the environment are wrong, otherwise 0."""
    try:
        settings, mistakes = Settings.load({}, environ), []
    except CommschedError as error:
        settings, mistakes = Settings(), [error_text(error)]
    for heading, lines in (
        ("versions", _versions()),
        ("engines and libraries", _engines()),
        ("transports", _transports()),
        ("network", _network(settings)),
        ("machine", _machine()),
        ("settings", iter([*mistakes]) if mistakes else _settings(settings, mistakes)),
    ):
        say_result(f"{heading}:")
        for line in lines:
            say_result(f"  {line}")
    return 1 if mistakes else 0


def _versions() -> Iterator[str]:
    libraries = ", ".join(f"{package} {_version(package) or 'is missing'}" for package in _REQUIRED)
    yield f"commsched {__version__}, Python {platform.python_version()}, {libraries}"
    yield f"{platform.system()} {platform.release()} ({platform.machine()})"


def _engines() -> Iterator[str]:
    for module, (name, package, extra) in _ENGINES.items():
        if find_spec(module) is None:
            yield f'{name:16}no; pip install "commsched[{extra}]"'
        else:
            yield f"{name:16}{_version(package) or 'yes'}"


def _transports() -> Iterator[str]:
    for name in transport_names():
        library = load_backend(name).library
        if library is None:
            yield f"{name:16}yes{'; within one process only, for tests' if name in FOR_TESTS else ''}"
        elif find_spec(library[0]) is None:
            yield f'{name:16}no; pip install "commsched[{library[1]}]"'
        else:
            found = f"yes, by {library[0]} {_version(library[0]) or ''}".rstrip()
            if name == "mpi":
                found += f", {_mpiexec()}"
            if name == "nccl":
                gpus, complaint = _gpus()
                found = found if gpus else f"no; {complaint or 'no GPU was found'}"
            yield f"{name:16}{found}"


def _mpiexec() -> str:
    path = shutil.which("mpiexec") or shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    return "no mpiexec in PATH: pip install mpich, or your system's MPI" if path is None else path


def _network(settings: Settings) -> Iterator[str]:
    yield from describe_interfaces() or ["no interface but loopback"]
    if settings.control is None:
        yield "control is not set: the ranks of one machine need none; across machines, see docs/settings.md"
        host = address_towards_the_world()
        yield f"this machine's address: {host} ({describe_link(host)}), unless host is set"
    else:
        try:
            host = own_host(Settings.load({"host": settings.host, "join_within": 1}, {}), settings.control)
            yield f"towards control={settings.control}, this machine's address is {host} ({describe_link(host)})"
            if host in _addresses(settings.control):  # it names this machine
                from ..net.rpc import listen  # imports gRPC, which takes long

                listen(settings.control).close()
                yield f"the port of control={settings.control} is free"
        except ConfigError as error:
            yield str(error)
        except OSError as error:
            yield f"the host of control={settings.control} is not found: {error.strerror or error}"
    first, last = given_out()
    ranks = f"{first} to {last}, where ranks listen at any free one"
    yield f"ports to open between machines: control's, those of servers, and {ranks}"


def _addresses(address: str) -> set[str]:
    """The addresses of the host in ``address``. Raises OSError if its name does not resolve."""
    host, _, port = address.rpartition(":")
    return {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)}


def address_towards_the_world() -> str:
    """The address of this machine on its default route; a loopback address if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing: only asks for the route (the address is for documentation)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _machine() -> Iterator[str]:
    yield f"{len(os.sched_getaffinity(0))} cores for this process, {_gigabytes(_memory_bytes())} of memory"
    try:
        shm = os.statvfs("/dev/shm")
        yield f"shared memory: {_gigabytes(shm.f_bavail * shm.f_frsize)} free in /dev/shm"
    except OSError as error:
        yield f"shared memory: /dev/shm: {error.strerror}"
    found, complaint = _gpus()
    yield from found or [complaint or "no GPU was found (nvidia-smi)"]


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _gpus() -> tuple[list[str], str]:
    """A line for each GPU, and what went wrong."""
    command = shutil.which("nvidia-smi")
    if command is None:
        found = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
        return [f"{len(found)} NVIDIA GPUs, but no nvidia-smi"] if found else [], ""
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [], f"nvidia-smi failed: {error}"
    return [f"GPU {number}: {line}" for number, line in enumerate(ended.stdout.splitlines())], ""


def _settings(settings: Settings, mistakes: list[str]) -> Iterator[str]:
    """Facts about the settings. Mistakes in them are added to ``mistakes``, too."""
    given = (settings.text_of(name) for name in sorted(settings.given - {"token"}))
    yield ", ".join(given) or "all are the defaults"
    try:
        token = read_token(settings)
        if token is None:
            yield "no token: commsched run makes one for each job; across machines, set COMMSCHED_TOKEN"
        else:
            require_strong_on(settings.hosts, token, settings.text_of("host"))
            try:
                require_strong(token, settings.control or "0.0.0.0:0")
            except ConfigError as error:
                if settings.control is not None:
                    raise
                yield str(error)  # for one machine it will do
            yield f"the length of the token is {len(token)}"
        if identity_of(settings.security, token or "not known yet", settings.certificates) is not None:
            made = "made from the token" if settings.certificates is None else f"in {settings.certificates}"
            yield f"security={settings.security}, with certificates {made}"
        require_transport(settings.transport)
        if settings.transport != "auto":
            yield from (wrong := without_effect(settings, settings.transport).values())
            mistakes += wrong
    except ConfigError as error:
        mistakes.append(str(error))
        yield str(error)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
