"""Command-line argument types that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from commsched.core.errors import ConfigError
from commsched.settings import Settings, parse_bytes
from commsched.transports import require_transport

FLOAT32_BYTES = 4


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
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return check


def float32_bytes(text: str) -> int:
    """Parse an option (``type=``): a size such as ``64KB``, in bytes, rounded down to whole float32 elements."""
    try:
        size = parse_bytes(text, "it") // FLOAT32_BYTES * FLOAT32_BYTES
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
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


def add_transport_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a transport and the numbers of ranks and servers, for benchmarks of one transport."""
    parser.add_argument("--transport", default="ps", help="the way gradients travel (default: ps)")
    parser.add_argument("--lane", default="tcp", help="of the parameter server: tcp, grpc (default: tcp)")
    parser.add_argument("--order", default="agreed", help="of collectives: agreed, static (default: agreed)")
    parser.add_argument("--policy", default="priority", help="order of partitions (default: priority)")
    parser.add_argument(
        "--collective", default="all_reduce", help="all_reduce, or rsag: reduce-scatter and all-gather (default: all_reduce)"
    )
    parser.add_argument(
        "--wire", default="none", help="dtype that gradients travel as: none, bfloat16, float16 (default: none)"
    )
    parser.add_argument("--hierarchy", default="auto", help="ranks of a host first: auto, on, off (default: auto)")
    parser.add_argument("--workers", type=at_least(2), default=2, metavar="N", help="ranks, a process each (default: 2)")
    parser.add_argument(
        "--servers", type=at_least(0), default=0, metavar="K", help="separate servers; 0: a shard on every rank"
    )


def transport_settings(args: argparse.Namespace) -> dict[str, str]:
    """The arguments of ``add_transport_arguments`` that are settings.

    Raises:
        ConfigError: a setting is wrong. It is raised here, so that it is reported once and before anything starts.
    """
    names = ("transport", "lane", "order", "policy", "collective", "wire", "hierarchy")
    settings = {name: str(getattr(args, name)) for name in names}
    check_settings(settings)
    return settings


def transport_words(args: argparse.Namespace) -> str:
    """The transport in words, such as ``ps over tcp`` or ``gloo``, and all settings that are not the default."""
    words = f"{args.transport} over {args.lane}" if args.transport == "ps" else args.transport
    extra = [
        f"order {args.order}" if args.order != "agreed" else "",
        f"policy {args.policy}" if args.policy != "priority" else "",
        f"collective {args.collective}" if args.collective != "all_reduce" else "",
    ]
    extra += [f"wire {args.wire}" if args.wire != "none" else ""]
    extra += [f"hierarchy {args.hierarchy}" if args.hierarchy != "auto" else ""]
    return ", ".join([words, *filter(None, extra)])


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
        raise ConfigError("transport='auto' does not say what is measured; name one")
    return require_transport(transport)
