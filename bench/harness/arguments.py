"""Command-line options and their types, as several benchmarks have them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from commsched import ConfigError
from commsched.settings import Settings, parse_bytes, parse_rate, parse_seconds
from commsched.transports import require_transport, transport_names

from .results import is_written_in_place

FLOAT32_BYTES = 4


#: How every loop uses all averages before an update, by the value of ``--clip``, for readers. The first is that of no value.
CLIPS = {"norm": "clipping by norm", "scaler": "with GradScaler"}


def at_least(least: int) -> Callable[[str], int]:
    """Parse an option (``type=``): a whole number of at least ``least``."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Parse an option (``type=``): a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def setting(parse: Callable[[object, str], object]) -> Callable[[str], str]:
    """Check an option (``type=``) with ``parse``, a function of ``commsched.settings``. The text is passed on unchanged."""

    def check(text: str) -> str:
        try:
            parse(text, "it")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("it=")) from error
        return text

    return check


def float32_bytes(text: str) -> int:
    """Parse an option (``type=``): a size such as ``64KB``, in bytes, rounded down to whole float32 elements."""
    try:
        size = parse_bytes(text, "it") // FLOAT32_BYTES * FLOAT32_BYTES
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("it=")) from error
    if size == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one float32 element")
    return size


def float32_sizes(text: str) -> list[int]:
    """Parse an option (``type=``): ``FROM:TO``, ``FROM:TO:FACTOR`` (default 4) or ``SIZE,SIZE,...``. TO is the last size."""
    if ":" not in text:
        return [float32_bytes(part) for part in text.split(",")]
    first, last, *rest = text.split(":")
    factor = at_least(2)(rest[0]) if rest else 4
    size, most = float32_bytes(first), float32_bytes(last)
    if len(rest) > 1 or size > most:
        raise argparse.ArgumentTypeError(f"{text!r} is not FROM:TO or FROM:TO:FACTOR with FROM at most TO")
    sizes = []
    while size < most:
        sizes.append(size)
        size *= factor
    return [*sizes, most]


def new_file(text: str) -> Path:
    """A file to write. A measurement may take an hour, so it does not begin if the result could not be kept."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{path}' is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory '{path.parent}'")
    if not is_written_in_place(path):
        _require_writable(path.parent)
    return path


def new_directory(text: str) -> Path:
    """A directory for results, which is made if it is not there."""
    path = Path(text)
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"'{there}' is no directory")
    _require_writable(there)
    return path


def _require_writable(directory: Path) -> None:
    if not os.access(directory, os.W_OK):
        raise argparse.ArgumentTypeError(f"nothing may be written to '{directory}'")


def or_auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Parse an option (``type=``): ``auto``, or a value for ``parse``."""

    def value(text: str) -> Any:
        if text == "auto":
            return text
        try:
            return parse(text)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{error}, or auto") from None

    return value


def list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parse an option (``type=``): different values for ``parse``, separated by commas."""

    def values(text: str) -> tuple[Any, ...]:
        found = tuple(parse(part) for part in text.split(","))
        if len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(f"{text!r} names one twice")
        return found

    return values


_TRANSPORTS = [name for name in transport_names() if name != "local"]  # which is for ranks that are threads

#: The options that several commands have: the keyword arguments of ``add_argument``. ``absent`` is the meaning of no value, and
#: ``auto`` that of the default ``"auto"``.
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "transport": {
        "metavar": "NAME",
        "help": f"transport of the gradients: {', '.join(_TRANSPORTS)}",
        "auto": "the one that a job takes that sets none",
    },
    "lane": {"metavar": "{tcp,grpc}", "help": "connections to the parameter server", "absent": "tcp"},
    "flows": {"type": at_least(1), "metavar": "N", "help": "connections between a rank and a server, over ps by tcp"},
    "security": {"metavar": "{none,tls}", "help": "encryption, over ps"},
    "order": {"help": "how ranks agree on the order of collectives: auto, agreed or static"},
    "policy": {"help": "policy of the scheduler"},
    "collective": {"help": "all_reduce, rsag (reduce-scatter and all-gather), or auto"},
    "wire": {"help": "dtype in which gradients travel: none, bfloat16 or float16"},
    "hierarchy": {"help": "whether the ranks of a host average among themselves first: auto, on or off"},
    "model": {"type": str, "metavar": "NAME", "help": "a model's name, or a profile's .json file"},
    "workers": {"type": at_least(2), "metavar": "N", "help": "number of ranks, each in a process of its own"},
    "servers": {"type": at_least(0), "metavar": "K", "help": "number of separate servers; 0: a shard on every rank"},
    "bandwidth": {
        "type": setting(parse_rate),
        "metavar": "RATE",
        "help": "rate of each link, such as 500mbit",
        "absent": "loopback",
    },
    "flow-bandwidth": {
        "type": setting(parse_rate),
        "metavar": "RATE",
        "help": "with a bandwidth: rate of each TCP connection, as clouds cap it",
        "absent": "no cap",
    },
    "rho": {"type": positive, "metavar": "X", "help": "EMULATED models: time of communication over time of computation"},
    "megabytes": {
        "type": positive,
        "metavar": "M",
        "help": "EMULATED models: size of all gradients",
        "absent": "uniform 72, others 48",
    },
    "partition": {
        "type": setting(parse_bytes),
        "metavar": "SIZE",
        "help": "greatest size of a partition",
        "auto": "chosen from measurements",
    },
    "credit": {
        "type": setting(parse_bytes),
        "metavar": "SIZE",
        "help": "bytes that may be on their way",
        "auto": "chosen from measurements",
    },
    "size": {"type": float32_bytes, "metavar": "SIZE", "help": "size of the tensor"},
    "rounds": {"type": at_least(1), "metavar": "N", "help": "number of turns of each system"},
    "steps": {"type": at_least(1), "metavar": "N", "help": "number of steps of a turn that count"},
    "settle": {"type": at_least(3), "metavar": "N", "help": "number of steps before them that do not count"},
    "repetitions": {"type": at_least(1), "metavar": "N", "help": "number of timed steps of each kind"},
    "timeout": {"type": setting(parse_seconds), "metavar": "SECONDS", "help": "time limit of the whole run"},
    "json": {"type": new_file, "metavar": "FILE", "help": "also write the results to FILE"},
}

#: The options that choose one transport, the numbers of ranks and servers, and their defaults.
TRANSPORT_OPTIONS = {
    **{"transport": "ps", "lane": "tcp", "flows": 1, "security": "none", "order": "auto", "policy": "priority"},
    **{"collective": "auto", "wire": "none", "hierarchy": "auto", "workers": 2, "servers": 0},
}


def add_options(parser: argparse._ActionsContainer, **defaults: Any) -> None:
    """Add options that several commands have, each with its default; None means that it may be absent.

    A size whose default is ``"auto"`` accepts ``auto``. An option whose default is a tuple takes a list.
    """
    for name, default in defaults.items():
        option = {"type": str, **_OPTIONS[name]}
        absent, auto = option.pop("absent", None), option.pop("auto", None)
        shown = absent if default is None else default
        if default == "auto" and option.get("metavar") == "SIZE":
            option["type"] = or_auto(option["type"])
        if default == "auto" and auto is not None:
            option["help"] += f"; auto: {auto}"
        if isinstance(default, tuple):
            option |= {"type": list_of(option["type"]), "metavar": f"{option['metavar']},..."}
            shown = ",".join(map(str, default))
        option["help"] += "" if shown is None else f" (default: {shown})"
        parser.add_argument(f"--{name}", default=default, **option)


def transport_settings(args: argparse.Namespace) -> dict[str, str]:
    """The arguments of ``TRANSPORT_OPTIONS`` that are settings.

    Raises:
        ConfigError: a setting is wrong. It is raised here, so that it is reported once and before anything starts.
    """
    settings = {name: str(getattr(args, name)) for name in TRANSPORT_OPTIONS if name not in ("workers", "servers")}
    check_settings(settings)
    return settings


def transport_columns(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``TRANSPORT_OPTIONS`` as columns of a row. Only the parameter server has a lane."""
    return {name: getattr(args, name) for name in TRANSPORT_OPTIONS} | ({} if args.transport == "ps" else {"lane": None})


def transport_words(args: argparse.Namespace) -> str:
    """The transport in words, such as ``ps over tcp`` or ``gloo``, and all settings that are not the default."""
    words = [f"{args.transport} over {args.lane}" if args.transport == "ps" else args.transport]
    for name in ("flows", "security", "order", "policy", "collective", "wire", "hierarchy"):
        if getattr(args, name) != TRANSPORT_OPTIONS[name]:
            words.append(f"{name} {getattr(args, name)}")
    return ", ".join(words)


def check_settings(settings: Mapping[str, str]) -> None:
    """Raise ConfigError for a wrong setting, so that it is reported once and before anything starts."""
    require_named(Settings.load(settings, {}).transport)


def require_named(transport: str) -> str:
    """Return ``transport`` if there is a transport of that name. ``auto`` is not accepted, because a benchmark must say which
    transport it measured.

    Raises:
        ConfigError: there is no transport of that name.
    """
    if transport == "auto":
        raise ConfigError("transport='auto' does not name the measured transport; name one")
    return require_transport(transport)


def require_extra(extra: str, *modules: str) -> None:
    """Raise ConfigError with the command that installs ``extra``, unless all of ``modules`` are installed. Imports none of
    them."""
    missing = [name for name in modules if not _is_installed(name)]
    if missing:
        raise ConfigError(f'this needs {" and ".join(missing)}: pip install "commsched[{extra}]"')


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # the module is imported, but has no spec
        return True
