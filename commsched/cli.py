"""``commsched run`` and ``commsched server``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields

from .core.config import Settings, parse_address
from .core.errors import CommschedError, ConfigError
from .rendezvous import read_token
from .session import quiet_grpc
from .transports import require_transport
from .version import __version__

#: Settings that make sense as options of ``commsched run``; the others concern jobs across machines.
_RUN_OPTIONS = (
    "transport",
    "lane",
    "order",
    "wire",
    "hierarchy",
    "partition",
    "credit",
    "fusion",
    "policy",
    "rate",
    "trace",
    "fail_after",
    "disable",
)
#: Likewise of ``commsched server``.
_SERVER_OPTIONS = ("lane",)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. An error of ours is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="commsched", description="Communication scheduling for data-parallel training.")
    parser.add_argument("--version", action="version", version=f"commsched {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="start the ranks of a job on this machine"))
    _add_server(commands.add_parser("server", help="serve one job as a parameter server"))
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.function(arguments))
    except CommschedError as error:
        print(f"commsched: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "commsched run -n N [--servers K] [options] -- COMMAND ..."
    parser.add_argument("-n", "--ranks", type=_positive, required=True, metavar="N", help="number of ranks (workers)")
    parser.add_argument(
        "--servers", type=_not_negative, default=0, metavar="K", help="parameter servers; 0: every rank hosts a shard"
    )
    _add_settings(parser, _RUN_OPTIONS)
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what every rank runs, after --")
    parser.set_defaults(function=_run)


def _run(arguments: argparse.Namespace) -> int:
    from .launch import run

    options = _given(arguments, _RUN_OPTIONS)
    # Here, so that a mistake is said once, and before anything starts.
    require_transport(Settings.load(options, os.environ).transport)
    if shutil.which(arguments.command[0]) is None:
        raise ConfigError(f"command {arguments.command[0]!r} is not found")
    environ = {**os.environ, **{f"COMMSCHED_{name.upper()}": value for name, value in options.items()}}
    return run(arguments.ranks, arguments.servers, arguments.command, environ)


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help="where to listen; port 0: any free one")
    _add_settings(parser, _SERVER_OPTIONS)
    parser.set_defaults(function=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    quiet_grpc()
    from .server import serve

    settings = Settings.load(_given(arguments, _SERVER_OPTIONS), os.environ)
    token = read_token(settings)
    if token is None:
        raise ConfigError("a server needs the job's token: set COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE")
    return serve(parse_address(arguments.bind, "--bind"), token, settings)


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    settings = {f.name: f for f in fields(Settings)}
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="VALUE", help=settings[name].metadata["help"])


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, str]:
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _positive(text: str) -> int:
    return _number(text, 1)


def _not_negative(text: str) -> int:
    return _number(text, 0)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
