"""``commsched run``, ``tune``, ``server``, ``doctor``, ``predict``, ``trace`` and ``bench``."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..control.rendezvous import job_name, read_token, require_strong, require_strong_on
from ..core.errors import CommschedError, ConfigError, error_text
from ..core.standard_streams import occupy, say_error
from ..core.world import World
from ..session.membership import require_can_be_elastic
from ..session.metrics import require_library
from ..session.opening import quiet_grpc
from ..settings import OneOf, Settings, nearest, parse_path, parse_rate, parse_server, require_one_of
from ..transports import require_transport, without_effect
from ..version import __version__

if TYPE_CHECKING:
    from .launch import Among, Elasticity

#: Options of ``commsched tune`` that have another name than their setting, with the setting's name.
_TUNE_OPTIONS = {"budget": "tune", "out": "tune_out", "by": "tune_by", "policies": "tune_policies"}


class _Parser(argparse.ArgumentParser):
    """Says where options belong if one is missing that may stand behind the command, to which it then belongs; and names the
    option that was likely meant by one that is unknown."""

    def error(self, message: str) -> NoReturn:
        if "arguments are required" in message and any(action.nargs == argparse.REMAINDER for action in self._actions):
            message += f"; write the options of {self.prog} before the command, since what follows the command is its own"
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Also refuses what is unknown: the parser of all commands, which calls this, does not know the options of this one."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            written = (word.partition("=")[0] for word in unknown if word.startswith("-"))
            close = next(filter(None, (nearest(word, options) for word in written)), None)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{'' if close is None else f'; did you mean {close}?'}")
        return found, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. A ``CommschedError`` is printed as one line on stderr, with exit code 2."""
    occupy()
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"]:
        return _bench(argv[1:])
    parser = argparse.ArgumentParser(prog="commsched", description="Communication scheduling for data-parallel training.")
    parser.add_argument("--version", action="version", version=f"commsched {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, (add, summary, example) in _COMMANDS.items():
        add(
            commands.add_parser(
                name,
                help=summary,
                description=f"{summary[0].upper()}{summary[1:]}.",
                epilog=f"example:\n  {example}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,  # what follows the command belongs to the command, whatever it looks like
            )
        )
    commands.add_parser("bench", help="measure what scheduling gains; see commsched bench --help")
    if not argv:
        say_error(parser.format_help().rstrip())
        return 2
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.function(arguments))
    except CommschedError as error:
        say_error(f"commsched: {error_text(error)}")
        return 2
    except KeyboardInterrupt:
        say_error("commsched: interrupted")
        return 130


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "commsched run -n N [--servers K] [--elastic [--local K]] [options] COMMAND ..."
    _add_job(parser)
    elastic = parser.add_argument_group("lost ranks")
    elastic_help = "go on when ranks are lost; the script uses commsched.Elastic (default: a lost rank ends the job)"
    elastic.add_argument("--elastic", action="store_true", help=elastic_help)
    restarts_help = (
        "with --elastic: so many processes may be started in place of lost ones (default: 3; with --local at least N)"
    )
    elastic.add_argument("--max-restarts", type=_at_least(0), metavar="K", help=restarts_help)
    min_help = "with --elastic: without restarts left, go on with fewer ranks, but not fewer than this (default: N)"
    elastic.add_argument("--min", type=_at_least(1), metavar="N", help=min_help)
    replace_help = (
        "with --elastic and --min: wait so long for a new process, and then go on without it until it comes (default: 30)"
    )
    elastic.add_argument("--replace-within", type=_seconds_like("30"), metavar="SECONDS", help=replace_help)
    standby_help = (
        "with --elastic: keep a process that has imported what the script imports, to take the place of a lost one soon; it "
        "takes memory"
    )
    elastic.add_argument("--standby", action="store_true", help=standby_help)
    local_help = (
        "with --elastic, on each of several machines, with COMMSCHED_CONTROL and COMMSCHED_TOKEN: how many of the N ranks this "
        "machine has room for (default: all, on this machine)"
    )
    elastic.add_argument("--local", type=_at_least(0), metavar="K", help=local_help)
    parser.set_defaults(function=_run)


def _run(arguments: argparse.Namespace) -> int:
    from .launch import run

    options = _given(arguments, Settings.names("run_option"))
    settings = _checked(options, arguments)
    elastic = _elasticity(arguments, settings)
    own_token = not settings.servers and (elastic is None or elastic.among is None)
    return run(arguments.ranks, arguments.servers, arguments.command, _environ(options, settings), elastic, own_token=own_token)


def _elasticity(arguments: argparse.Namespace, settings: Settings) -> Elasticity | None:
    from .launch import Elasticity

    if not arguments.elastic:
        for option in ("min", "max_restarts", "replace_within", "local", "standby"):
            if (given := getattr(arguments, option)) is not None and given is not False:
                raise ConfigError(f"--{option.replace('_', '-')} is for --elastic only")
        return None
    if arguments.ranks < 2 or settings.disable:
        raise ConfigError("--elastic needs several ranks that train together")
    require_can_be_elastic(settings)
    min_ranks = arguments.ranks if arguments.min is None else arguments.min
    if min_ranks > arguments.ranks:
        raise ConfigError(f"--min {min_ranks} is more than the {arguments.ranks} ranks of -n")
    among = _among(arguments, settings)
    # A machine may be lost with all of its ranks.
    default_restarts = 3 if among is None else max(3, arguments.ranks)
    max_restarts = default_restarts if arguments.max_restarts is None else arguments.max_restarts
    replace_within = 30.0 if arguments.replace_within is None else arguments.replace_within
    if arguments.standby and not _is_script(arguments.command):
        raise ConfigError("--standby is for a script in Python: commsched run --elastic --standby ... train.py")
    kept, token = None, read_token(settings)
    if settings.servers and token is not None:
        quiet_grpc()
        from .elastic.kept import KeptServers

        kept = KeptServers(settings, token)
    has_file = settings.token is None and (among is not None or kept is not None)
    return Elasticity(
        min_ranks,
        max_restarts,
        settings.join_within,
        replace_within,
        arguments.standby,
        among,
        kept,
        token if has_file else None,
    )


def _is_script(command: Sequence[str]) -> bool:
    """Whether ``command`` is Python with a script, and without options of Python's own."""
    return Path(command[0]).name.startswith("python") and len(command) > 1 and command[1].endswith(".py")


def _among(arguments: argparse.Namespace, settings: Settings) -> Among | None:
    from ..net.tls import identity_of
    from .launch import Among

    if arguments.local is None:
        if settings.control is not None:
            raise ConfigError(
                f"{settings.text_of('control')} is for elastic jobs on several machines: say by --local how many of the ranks "
                "each has room for"
            )
        return None
    if settings.control is None:
        raise ConfigError("--local needs COMMSCHED_CONTROL=host:port, where the launchers of all machines meet")
    token = read_token(settings)
    if token is None:
        raise ConfigError("--local needs the same COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE on every machine")
    require_strong(token, settings.control)
    require_strong_on(settings.hosts, token, settings.text_of("host"))
    if arguments.servers:
        raise ConfigError(
            f"--servers {arguments.servers} cannot be used with --local: start servers by commsched server --keep, and name "
            "them in COMMSCHED_SERVERS"
        )
    return Among(
        settings.control,
        token,
        job_name(World(), settings, {}),
        arguments.local,
        settings.hosts[0] if settings.hosts else None,
        identity_of(settings.security, token, settings.certificates),
        settings.fail_after,
    )


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.usage = "commsched tune -n N --out FILE [--budget 12trials] [--by bayes] [options] COMMAND ..."
    settings = {f.name: f for f in fields(Settings)}
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument(
        "--out", required=True, metavar="FILE", help="file for the result, such as tuned.toml; the trials go to tuned.jsonl"
    )
    tuning.add_argument(
        "--budget", metavar="VALUE", help="the longest that tuning may take: 90s, 500steps, 20trials (default: 12trials)"
    )
    for option in ("by", "policies"):
        setting = settings[_TUNE_OPTIONS[option]]
        text = f"{setting.metadata['help']} (default: {_default(setting)})"
        tuning.add_argument(f"--{option}", metavar="VALUE", help=text)
    tuning.add_argument("--then-stop", action="store_true", help="end training once tuning has ended; default: go on")
    _add_job(parser)
    parser.set_defaults(function=_tune)


def _tune(arguments: argparse.Namespace) -> int:
    from .tune import require_tunable, tune

    given = _given(arguments, Settings.names("run_option"))
    if arguments.budget is not None:  # an error names the option, and not its setting
        next(f for f in fields(Settings) if f.name == "tune").metadata["parse"](arguments.budget, "--budget")
    tuning = {
        name: getattr(arguments, option) for option, name in _TUNE_OPTIONS.items() if getattr(arguments, option) is not None
    }
    options = {**given, **tuning}
    settings = _checked(options, arguments)
    if settings.tune is None and arguments.budget is None:
        options["tune"] = "1"
        settings = _checked(options, arguments)
    if settings.trace is not None and arguments.then_stop:
        raise ConfigError("a timeline is written at the end of training, which --then-stop does not reach: choose one")
    require_tunable(arguments.ranks, settings)
    ranks, servers, command = arguments.ranks, arguments.servers, arguments.command
    run = ["commsched", "run", "-n", str(ranks), *(["--servers", str(servers)] if servers else [])]
    kept = {name: value for name, value in given.items() if not name.startswith("trace")}
    run += [word for name, value in kept.items() for word in (f"--{name.replace('_', '-')}", value)]
    use = f"COMMSCHED_CONFIG={shlex.quote(arguments.out)} {shlex.join([*run, '--', *command])}"
    return tune(ranks, servers, command, _environ(options, settings), settings, then_stop=arguments.then_stop, use=use)


def _add_server(parser: argparse.ArgumentParser) -> None:
    bind_help = "where to listen, or one address of each card with + between; port 0: any free one (default: 127.0.0.1:0)"
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT", help=bind_help)
    parser.add_argument(
        "--keep", action="store_true", help="serve one job after another, as restarts need it; default: one job"
    )
    _add_settings(parser, Settings.names("server_option"))
    parser.set_defaults(function=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    quiet_grpc()
    from .server import serve, serve_jobs

    settings = Settings.load(_given(arguments, Settings.names("server_option")), os.environ)
    token = read_token(settings)
    if token is None:
        raise ConfigError("a server needs the job's token: set COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE")
    address = parse_server(arguments.bind, "--bind")
    require_strong(token, address)
    if arguments.keep:
        serve_jobs(address, token, settings)
    return serve(address, token, settings)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.usage = "commsched doctor [--listen [HOST:PORT] | --peer HOST:PORT]"
    ends = parser.add_mutually_exclusive_group()
    listen_help = "wait for another machine's commsched doctor --peer; default: this machine's address, port 29600"
    ends.add_argument("--listen", nargs="?", const="", metavar="HOST:PORT", help=listen_help)
    peer_help = "test the control channel and the network to the machine that listens there, with COMMSCHED_TOKEN"
    ends.add_argument("--peer", metavar="HOST:PORT", help=peer_help)
    parser.set_defaults(function=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    quiet_grpc()
    from .doctor import examine
    from .peer_test import await_peer, join_peer

    if arguments.listen is not None:
        return await_peer(arguments.listen, os.environ)
    if arguments.peer is not None:
        return join_peer(arguments.peer, os.environ)
    return examine(os.environ)


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.usage = "commsched predict --model FILE --workers 8,64 --bandwidth 10gbit,25gbit [options] [-- ARGUMENT ...]"
    model_help = (
        "layers and their times: a profile, or what session.stats() gave on rank 0, as JSON; or a training script with "
        "PyTorch, such as train.py, which then runs as one process for some steps"
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help=model_help)
    workers_help = "numbers of workers, each with a network card of its own"
    parser.add_argument("--workers", type=_list_of(_at_least(2)), required=True, metavar="N,...", help=workers_help)
    rates_help = "rates of the network cards, such as 1gbit,10gbit"
    parser.add_argument("--bandwidth", type=_list_of(_rate), required=True, metavar="RATE,...", help=rates_help)
    servers_help = "parameter servers on machines of their own (default: 0)"
    parser.add_argument("--servers", type=_at_least(0), default=0, metavar="K", help=servers_help)
    transport_help = (
        "the transport of commsched: ps, gloo (mpi is alike), or auto, which a job with PyTorch has by default: ps for up to 7 "
        "workers and with servers, otherwise gloo (default: auto)"
    )
    parser.add_argument("--transport", default="auto", metavar="{auto,ps,gloo}", help=transport_help)
    for name, default, text in (
        ("overhead", 50e-6, "seconds that a partition, or a bucket of DDP, costs besides its bytes"),
        ("latency", 50e-6, "seconds in which a message arrives after it has left"),
    ):
        parser.add_argument(
            f"--{name}", type=_seconds_like("50e-6"), default=default, metavar="SECONDS", help=f"{text} (default: {default})"
        )
    parser.add_argument("--clip", action="store_true", help="every loop clips by the norm of the averages")
    parser.add_argument(
        "--wire16", action="store_true", help="gradients travel in 16 bits (wire=bfloat16; DDP with its hook for that)"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    plot_help = "also draw the rows to FILE, such as predict.svg or predict.png"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot_help)
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of the training script, after --")
    parser.set_defaults(function=_predict)


def _predict(arguments: argparse.Namespace) -> int:
    from .predict import TRANSPORTS, Question, predict, read_model, require_file, require_plot, transport_of

    require_one_of(TRANSPORTS, arguments.transport, "--transport")
    if arguments.servers and arguments.transport == "gloo":
        raise ConfigError(_only_ps_has_servers(arguments.servers, arguments.transport))
    if arguments.plot is not None:
        require_plot(arguments.plot)
    clips, gloo = arguments.clip, True
    if arguments.model.suffix == ".py":
        from .record import record_script

        require_file(arguments.model)
        recorded = record_script(arguments.model, arguments.arguments, os.environ)
        profile, clips, gloo = recorded.profile, clips or recorded.clips, recorded.gloo
        if recorded.waits is not None:
            say_error(f"commsched: {recorded.waits} waits for all averages. The table is for a loop without that wait")
    elif arguments.arguments:
        raise ConfigError(f"{arguments.arguments[0]}: only a training script (--model train.py) takes arguments")
    else:
        profile = read_model(arguments.model)
    servers, overhead, latency = arguments.servers, arguments.overhead, arguments.latency
    questions = [
        Question(workers, rate, servers, overhead, latency, clips, arguments.wire16, transport)
        for workers in arguments.workers
        for transport in [transport_of(arguments.transport, workers, servers, gloo)]
        for rate in arguments.bandwidth
    ]
    return predict(profile, questions, as_json=arguments.json, plot=arguments.plot)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.usage = "commsched trace FILE [--rank R] [--json]"
    parser.add_argument("file", type=Path, metavar="FILE", help="a timeline, such as trace.json, or the directory that has it")
    parser.add_argument("--rank", type=_at_least(0), metavar="R", help="the rank to look at; default: the first in the file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(function=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    from .trace import summarise

    return summarise(arguments.file, arguments.rank, as_json=arguments.json)


def _bench(argv: Sequence[str]) -> int:
    """Run the benchmarks, which have a command line of their own. A wheel holds them in this package, a checkout beside it."""
    try:
        module = import_module("commsched.bench.__main__")
    except ModuleNotFoundError as error:
        if error.name != "commsched.bench":
            raise
        sys.path.insert(0, str(Path(__file__).parents[2]))  # any directory before it may have a bench of its own
        module = import_module("bench.__main__")
    return int(module.main(argv))


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [parse(part.strip()) for part in text.split(",")]


def _rate(text: str) -> float:
    try:
        return parse_rate(text, "bandwidth")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds_like(example: str) -> Callable[[str], float]:
    def seconds(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a time; write it in seconds, like {example}")
        return number

    return seconds


def _add_job(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("job")
    job.add_argument("-n", "-np", "--ranks", type=_at_least(1), required=True, metavar="N", help="number of ranks (workers)")
    servers_help = "parameter servers; 0: every rank hosts a shard (default: 0)"
    job.add_argument("--servers", type=_at_least(0), default=0, metavar="K", help=servers_help)
    command_help = "the command that every rank runs, with its options, or a script in Python; -- may stand before it"
    job.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help=command_help)
    _add_settings(parser, Settings.names("run_option"))


def _checked(options: Mapping[str, str], arguments: argparse.Namespace) -> Settings:
    """The settings of the ranks to come: a mistake is reported once, and before anything starts. The command in ``arguments``
    becomes one that can be started."""
    arguments.command = _startable(arguments.command)
    settings = Settings.load(options, os.environ)
    require_transport(settings.transport)
    if settings.transport != "auto":
        if arguments.servers and settings.transport != "ps":
            raise ConfigError(_only_ps_has_servers(arguments.servers, settings.transport))
        for problem in without_effect(settings, settings.transport).values():
            raise ConfigError(problem)
    named = f"servers={','.join(settings.servers)!r}"
    if settings.servers and arguments.servers:
        raise ConfigError(f"--servers {arguments.servers} cannot be used with {named}: choose one")
    if settings.servers and read_token(settings) is None:
        raise ConfigError(f"{named} needs the token of these servers: set COMMSCHED_TOKEN or COMMSCHED_TOKEN_FILE")
    if settings.metrics is not None:
        require_library()
    if settings.security != "none":
        from ..net.tls import identity_of

        identity_of(settings.security, read_token(settings) or "not known yet", settings.certificates)
    return settings


def _only_ps_has_servers(servers: int, transport: str) -> str:
    return f"--servers {servers} cannot be used with transport={transport}: only ps has servers"


def _startable(command: Sequence[str]) -> list[str]:
    """``command`` without a leading ``--``, and with Python before a script.

    Raises:
        ConfigError: there is no command, or it was not found.
    """
    command = list(command[1:] if command[:1] == ["--"] else command)
    if not command:
        raise ConfigError("there is no command: write it after the options, such as commsched run -n 2 train.py --lr 0.1")
    if shutil.which(command[0]) is not None:
        return command
    if command[0].endswith(".py") and Path(command[0]).is_file():
        return [sys.executable, *command]
    if Path(command[0]).is_dir():
        raise ConfigError(f"command {command[0]!r} is a directory; name the script or the program to run")
    raise ConfigError(f"command {command[0]!r} was not found")


def _environ(options: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The environment of the ranks to come. Files are named from here, wherever the script goes before it joins the job."""
    environ = {**os.environ, **{f"COMMSCHED_{name.upper()}": value for name, value in options.items()}}
    for name in (f.name for f in fields(Settings) if f.metadata.get("parse") is parse_path):
        if (path := getattr(settings, name)) is not None:
            environ[f"COMMSCHED_{name.upper()}"] = path
    if config := environ.get("COMMSCHED_CONFIG"):
        environ["COMMSCHED_CONFIG"] = parse_path(config, "COMMSCHED_CONFIG")
    return environ


#: The headings of options that are settings. Settings without one come last.
_GROUPS = {
    "network": ("transport", "lane", "flows", "security", "order", "collective", "wire", "hierarchy", "rate"),
    "schedule": ("partition", "credit", "fusion", "policy"),
    "what is said and checked": ("log", "trace", "trace_steps", "metrics", "check_weights"),
}
_OTHERS = "failures and the rest"


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    settings = {f.name: f for f in fields(Settings)}
    grouped = {name for group in _GROUPS.values() for name in group}
    for heading, members in {**_GROUPS, _OTHERS: [name for name in names if name not in grouped]}.items():
        shown = [name for name in members if name in names]
        group = parser.add_argument_group(heading) if shown else parser
        for name in shown:
            text = f"{settings[name].metadata['help']} (default: {_default(settings[name])})"
            group.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar=_choices(settings[name]), help=text)


def _choices(setting: Field[Any]) -> str:
    """The values that a user may write for a setting, for the help."""
    parse = setting.metadata["parse"]
    return f"{{{','.join(parse.words)}}}" if isinstance(parse, OneOf) else "VALUE"


def _default(setting: Field[Any]) -> str:
    """The default of a setting as a user writes it."""
    value = setting.default
    if value == ():
        return "none"
    if value is None:
        try:
            return "auto" if setting.metadata["parse"]("auto", setting.name) is None else "none"
        except ConfigError:
            return "none"
    return f"{value:g}" if isinstance(value, bool | float) else str(value)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, str]:
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return number


#: By name: the function that adds the command's arguments, what the command does, and an example.
_COMMANDS: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], str, str]] = {
    "run": (
        _add_run,
        "start the ranks of a job on this machine",
        "commsched run -n 4 --transport gloo train.py --lr 0.1",
    ),
    "tune": (
        _add_tune,
        "start the ranks of a job, and search for the best partition and credit",
        "commsched tune -n 4 --out tuned.toml --budget 90s train.py --lr 0.1",
    ),
    "server": (
        _add_server,
        "serve a job as a parameter server",
        "COMMSCHED_TOKEN=... commsched server --bind 10.0.0.9:29700",
    ),
    "doctor": (
        _add_doctor,
        "show what commsched finds on this machine, and test the way to another",
        "commsched doctor",
    ),
    "predict": (
        _add_predict,
        "simulate the training of a model on a cluster that is not there",
        "commsched predict --model train.py --workers 8,64 --bandwidth 10gbit,25gbit",
    ),
    "trace": (
        _add_trace,
        "summarise a timeline that a job has written",
        "commsched trace traces/trace.json --rank 0",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
