"""Settings, from the first source that sets them: keyword arguments, ``COMMSCHED_*``, a TOML file, defaults. All parsing of
settings is here.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import threading
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from .core.errors import ConfigError
from .core.policies import policy_names
from .core.scheduler import COLLECTIVES, LAUNCH_ORDERS, MAX_PARTITION_BYTES, SchedulerConfig

#: The most connections between a rank and a server. Each has two threads at both ends.
MAX_FLOWS = 32

# --- parsers: each raises ConfigError, which names ``key``, the value and the right form, for a value of another form ---

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def parse_bytes(value: object, key: str = "size") -> int:
    """Parse ``"4MB"`` (MB is 10^6), ``"4MiB"`` (MiB is 2^20) or a number of bytes. Returns bytes, at least 1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", str(value).strip().upper())
    size = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    if not 0.5 < size < math.inf:
        raise ConfigError(f"{key}={value!r} is not a size; write it like 4MB, 512KiB or 65536")
    return round(size)


def parse_rate(value: object, key: str = "rate") -> float:
    """Parse ``"200mbit"`` (bits per second, as ``tc`` writes them: kbit, mbit, gbit). Returns bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])?bit(?:/s|ps)?", str(value).strip().lower())
    rate = float(match[1]) * _UNITS[(match[2] or "").upper()] / 8 if match else 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"{key}={value!r} is not a rate; write it like 200mbit or 1gbit")
    return rate


def parse_seconds(value: object, key: str = "seconds") -> float:
    """Parse a positive number of seconds, with or without an ``s`` at the end."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*s?", str(value).strip())
    if match and float(match[1]) <= 0:
        raise ConfigError(f"{key}={value!r} is not above 0; write it in seconds, like 10 or 2.5")
    if not match or float(match[1]) > threading.TIMEOUT_MAX:
        raise ConfigError(f"{key}={value!r} is not a time; write it in seconds, like 10 or 2.5")
    return float(match[1])


def parse_switch(value: object, key: str = "switch") -> bool:
    """Parse True or False, or one of the words 1, 0, true, false, yes, no, on, off. Empty text is False."""
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ConfigError(f"{key}={value!r} is neither on nor off; write 1 or 0")


def parse_address(value: object, key: str = "address") -> str:
    """Parse ``"host:port"`` with a port of 0 to 65535; an IPv6 host is in brackets."""
    text = str(value).strip()
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w-]+\]|[^\s:/,+\[\]]+):(\d{1,5})", text)
    if not match or int(match[2]) > 65535:
        raise ConfigError(f"{key}={value!r} is not an address; write it like 10.0.0.7:29600")
    if not _is_name(match[1]):
        raise ConfigError(f"{key}={value!r}: {match[1]} is no name of a host")
    return text


def _is_name(host: str) -> bool:
    """Whether Python can ask for the address of ``host``."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def parse_server(value: object, key: str = "address") -> str:
    """Parse the address of a parameter server, or several with ``+`` between them: it listens at each. See :func:`each_of`."""
    return together(parse_address(each, key) for each in each_of(str(value)))


def each_of(addresses: str) -> list[str]:
    """The addresses of one process, which are written with ``+`` between them."""
    return addresses.split("+")


def together(addresses: Iterable[str]) -> str:
    """The opposite of :func:`each_of`."""
    return "+".join(addresses)


def _host(value: object, key: str) -> str:
    hosts = [each.strip() for each in each_of(str(value))]
    if len(set(hosts)) < len(hosts) or not all(hosts):
        raise ConfigError(f"{key}={value!r}: write one address, or several different ones like 10.0.0.7+10.1.0.7")
    for host in hosts:
        if not _is_name(host) or re.fullmatch(r"[^:]*:\d+|\[.*\]:\d+", host):
            raise ConfigError(f"{key}={value!r}: {host} is no address of a host; write one without a port, like 10.0.0.7")
    return together(hosts)


def _steps(value: object, key: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", str(value).strip())
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"{key}={value!r} are no steps; write them like 10-20")
    return int(match[1]), int(match[2] or match[1])


def _metrics(value: object, key: str) -> str:
    text = str(value).strip()
    try:
        return parse_address(f"127.0.0.1:{text}" if text.isdecimal() else text, key)
    except ConfigError:
        raise ConfigError(f"{key}={value!r} is not a port; write it like 9400, 0.0.0.0:9400 or [::]:9400") from None


def _addresses(value: object, key: str) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else [part for part in str(value).split(",") if part.strip()]
    return tuple(parse_server(part, key) for part in parts)


def _partition(value: object, key: str) -> int | None:
    size = _size_or_auto(value, key)
    if size is not None and size > MAX_PARTITION_BYTES:
        raise ConfigError(f"{key}={value!r} is more than the largest partition, {MAX_PARTITION_BYTES // 2**20}MiB")
    return size


def _size_or_auto(value: object, key: str) -> int | None:
    if str(value).strip().lower() == "auto":
        return None
    try:
        return parse_bytes(value, key)
    except ConfigError as error:
        raise ConfigError(f"{error}, or auto") from None


def nearest(word: str, words: Sequence[str]) -> str | None:
    """The one of ``words`` that was likely meant by ``word``, if there is one."""
    return next(iter(difflib.get_close_matches(word, words, 1)), None)


def require_one_of(words: Sequence[str], value: object, key: str) -> str:
    """Return ``value`` if it is one of ``words``.

    Raises:
        ConfigError: ``value`` is none of them; the message names ``key``, the value, the word that was likely meant, and all
            words.
    """
    if value not in words:
        close = nearest(str(value), words)
        hint = f"did you mean {close}? " if close else ""
        raise ConfigError(f"{key}={value!r} is unknown; {hint}there are: {', '.join(words)}")
    return str(value)


def _policy(value: object, key: str) -> str:
    return require_one_of(policy_names(), value, key)


class OneOf:
    """A parser that accepts one of ``words``."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self, value: object, key: str) -> str:
        return require_one_of(self.words, value, key)


def _count(value: object, key: str) -> int:
    if not str(value).strip().isdecimal():
        raise ConfigError(f"{key}={value!r} is not a number; write 0 or more")
    return int(str(value))


def _flows(value: object, key: str) -> int:
    text = str(value).strip()
    if not text.isdecimal() or not 1 <= int(text) <= MAX_FLOWS:
        raise ConfigError(f"{key}={value!r} is not a number of connections; write 1 to {MAX_FLOWS}")
    return int(text)


def _utf8(value: object, key: str) -> str:
    """Text that goes to other machines. A value that is none is not shown, since it may be a secret."""
    text = _text(value, key)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key} has bytes that are no text in UTF-8") from None
    return text


def _text(value: object, key: str) -> str:
    return str(value)


def parse_path(value: object, key: str) -> str:
    """A path, made absolute: a script may change its directory before a file is opened."""
    try:
        return os.path.abspath(str(value))
    except FileNotFoundError:
        raise ConfigError(f"{key}={value!r}: this process is in a directory that is gone; write the whole path") from None


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on how long tuning may take. Tuning ends at the first limit that it reaches, or earlier. ``None`` means no limit
    of that kind."""

    trials: int | None = None
    steps: int | None = None
    seconds: float | None = None


#: The budget of ``tune=1``: enough for the searcher on most models, and for the comparison at the end.
DEFAULT_BUDGET = Budget(trials=12)


def _budget(value: object, key: str) -> Budget | None:
    """Parse on or off, or a limit such as ``"90s"``, ``"500 steps"`` or ``"20 trials"``."""
    if isinstance(value, Budget):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|steps|trials)", str(value).strip())
    if match is None:
        try:
            return DEFAULT_BUDGET if parse_switch(value, key) else None
        except ConfigError:
            pass
    elif match[2] == "s":
        return Budget(seconds=parse_seconds(match[1], key))
    elif match[1].isdecimal() and int(match[1]) > 0:
        return Budget(**{match[2]: int(match[1])})
    raise ConfigError(f"{key}={value!r} is not a budget; write 1, 0, or how long to tune, like 90s, 500steps or 20trials")


def _policies(value: object, key: str) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return tuple(_policy(str(part).strip(), key) for part in parts)


def _tuned(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r} is not the table that commsched tune writes")
    return dict(value)


def _setting(
    parse: Callable[[object, str], Any],
    default: Any,
    help: str,
    *,
    shown: bool = True,
    same_on_all_ranks: bool = False,
    run_option: bool = False,
    server_option: bool = False,
    some_transports: bool = False,
) -> Any:
    """A field of :class:`Settings`.

    Args:
        shown: whether ``repr`` shows the value; False for a secret.
        same_on_all_ranks: whether ranks compare the value when they join.
        run_option: whether ``commsched run`` has it as an option. The others concern jobs across machines or tuning, or are set
            by commsched.
        server_option: whether ``commsched server`` has it as an option.
        some_transports: whether it has an effect with some transports only. Each transport names those that it uses
            (``transports.backend``).
    """
    facts = {
        "same_on_all_ranks": same_on_all_ranks,
        "run_option": run_option,
        "server_option": server_option,
        "some_transports": some_transports,
    }
    return field(default=default, metadata={"parse": parse, "help": help, **facts}, repr=shown)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a user may set. A field's name is the keyword of ``commsched.init`` and the key, in lower case, in the TOML
    file that ``COMMSCHED_CONFIG`` names. The environment variable is ``COMMSCHED_<NAME>``."""

    transport: str = _setting(
        _text, "auto", "the transport of gradients, such as auto, ps, gloo, mpi, nccl", same_on_all_ranks=True, run_option=True
    )
    servers: tuple[str, ...] = _setting(
        _addresses,
        (),
        "parameter servers, host:port,...; none: every rank hosts a shard",
        same_on_all_ranks=True,
        some_transports=True,
    )
    lane: str = _setting(
        OneOf("tcp", "grpc"),
        "tcp",
        "the carrier of messages to parameter servers: tcp, grpc",
        same_on_all_ranks=True,
        run_option=True,
        server_option=True,
        some_transports=True,
    )
    flows: int = _setting(
        _flows,
        1,
        "connections between a rank and each server, for networks that cap a single one (lane tcp)",
        same_on_all_ranks=True,
        run_option=True,
        some_transports=True,
    )
    security: str = _setting(
        OneOf("none", "tls"),
        "none",
        "encryption of all that travels, and proof that both ends belong to the job: none, tls (transport ps)",
        same_on_all_ranks=True,
        run_option=True,
        server_option=True,
        some_transports=True,
    )
    order: str = _setting(
        OneOf("auto", *LAUNCH_ORDERS),
        "auto",
        "order of collectives: agreed (in every step), static (without messages, once it repeats itself), auto (static, if "
        "steps are not slower with it)",
        same_on_all_ranks=True,
        run_option=True,
        some_transports=True,
    )
    collective: str = _setting(
        OneOf("auto", *COLLECTIVES),
        "auto",
        "how an average is made: all_reduce, rsag (a reduce-scatter and an all-gather, between which others may go), "
        "auto (all_reduce, but rsag for the gradients of a loop that uses their norm, as clipping does)",
        same_on_all_ranks=True,
        run_option=True,
        some_transports=True,
    )
    wire: str = _setting(
        OneOf("none", "bfloat16", "float16"),
        "none",
        "dtype in which float32 gradients travel: none, bfloat16, float16 (a host's sum above 65504 becomes infinite)",
        same_on_all_ranks=True,
        run_option=True,
        some_transports=True,
    )
    hierarchy: str = _setting(
        OneOf("auto", "on", "off"),
        "auto",
        "sum over the ranks of a host first, and let one of them use the network: auto (if several hosts have several ranks), "
        "on, off",
        same_on_all_ranks=True,
        run_option=True,
        some_transports=True,
    )
    #: None means auto.
    partition: int | None = _setting(
        _partition, None, "largest partition, such as 4MB, or auto: chosen from the model and the first steps", run_option=True
    )
    credit: int | None = _setting(
        _size_or_auto,
        None,
        "bytes committed to the network at a time, such as 16MB, or auto, as for the partition",
        run_option=True,
    )
    fusion: int | None = _setting(
        parse_bytes,
        None,
        "small neighbours are merged up to this; none: up to a quarter of the partition, at least 64KB, and up to 16KB with a "
        "larger tensor in front of them",
        run_option=True,
    )
    policy: str = _setting(_policy, "priority", "order of ready partitions, such as priority, fifo", run_option=True)
    rate: float | None = _setting(
        parse_rate,
        None,
        "highest rate at which a rank may send, such as 200mbit; none: no cap",
        run_option=True,
        some_transports=True,
    )
    trace: str | None = _setting(parse_path, None, "directory for a timeline of every task; none: no timeline", run_option=True)
    trace_steps: tuple[int, int] | None = _setting(
        _steps, None, "the first and the last step of the timeline, such as 10-20; none: all", run_option=True
    )
    metrics: str | None = _setting(
        _metrics,
        None,
        "port, or host:port, of Prometheus metrics, to which a rank adds its local rank; a port alone: for this machine only",
        run_option=True,
    )
    log: str | None = _setting(
        OneOf("warning", "info", "debug"),
        None,
        "how much is logged: warning, info, debug; none: a few lines on the job, and warnings",
        run_option=True,
    )
    check_weights: int = _setting(
        _count,
        100,
        "steps between two comparisons of a part of the weights between ranks; 0: no comparison",
        same_on_all_ranks=True,
        run_option=True,
    )
    fail_after: float = _setting(
        parse_seconds,
        10.0,
        "seconds of silence after which a rank or server counts as lost",
        same_on_all_ranks=True,
        run_option=True,
    )
    stall_after: float | None = _setting(
        parse_seconds,
        None,
        "seconds of waiting for a rank that lives but does not send, after which the job ends; none: only warnings",
        same_on_all_ranks=True,
        run_option=True,
    )
    join_within: float = _setting(parse_seconds, 60.0, "seconds within which all ranks must have joined")
    tune: Budget | None = _setting(  # noqa: RUF009 - Budget is frozen
        _budget, None, "search for a better partition and credit during training: 1, or a budget: 90s, 500steps, 20trials"
    )
    tune_out: str | None = _setting(
        parse_path, None, "file for the result of tuning, such as tuned.toml; none: the result is only logged"
    )
    tune_by: str = _setting(_text, "bayes", "how to search: bayes, grid, random, sgd")
    tune_policies: tuple[str, ...] = _setting(_policies, (), "policies to choose from in tuning; none: the one that is set")
    tune_end: str | None = _setting(
        _text, None, "file for the reason of an end of tuning without a result; commsched tune sets it"
    )
    record: str | None = _setting(
        parse_path, None, "file for the layers and times of a rank that is alone; commsched predict sets it"
    )
    launcher_file: str | None = _setting(_text, None, "file through which ranks report to commsched run, which sets it")
    tuned: Mapping[str, Any] | None = _setting(_tuned, None, "the jobs that a tuned file is for: in the file only")
    disable: bool = _setting(parse_switch, False, "1: train exactly as without commsched", run_option=True)
    control: str | None = _setting(parse_address, None, "host:port where rank 0 listens; needed across machines")
    host: str | None = _setting(
        _host, None, "address at which others reach this rank, or one of each card with + between; none: found automatically"
    )
    job: str | None = _setting(_utf8, None, "the job's name, if several jobs have one token and address; none: the launcher's")
    token: str | None = _setting(_utf8, None, "the job's secret; needed across machines", shown=False)
    token_file: str | None = _setting(parse_path, None, "a file of mode 0600 that holds the token")
    certificates: str | None = _setting(
        parse_path, None, "directory with ca.crt, tls.crt and tls.key for security=tls; none: made from the token"
    )
    rendezvous: str | None = _setting(parse_path, None, "file in which rank 0 gives its address to ranks of the same machine")
    #: Names of the settings that the user set, which tuning does not change. Settings from a tuned file do not count: tuning
    #: starts from them.
    given: frozenset[str] = frozenset()

    @property
    def scheduler(self) -> SchedulerConfig:
        """The configuration before anything is chosen. A credit that is chosen is four partitions until then."""
        partition = SchedulerConfig().partition_bytes if self.partition is None else self.partition
        credit = 4 * partition if self.credit is None else self.credit
        collective = SchedulerConfig().collective if self.collective == "auto" else self.collective
        order = SchedulerConfig().order if self.order == "auto" else self.order
        return SchedulerConfig(partition, credit, self.policy, self.fusion, collective, order)

    @property
    def chooses_sizes(self) -> bool:
        """Whether the partition, the credit or both are to be chosen."""
        return self.partition is None or self.credit is None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses in ``host``, without brackets. Empty if they are to be found."""
        return () if self.host is None else tuple(each.strip("[]") for each in each_of(self.host))

    def text_of(self, name: str) -> str:
        """The setting ``name`` with its value, as in an error: ``lane='grpc'``, ``rate=200mbit``, ``trace_steps=5-8``."""
        value = getattr(self, name)
        if name == "trace_steps" and value is not None:
            return f"{name}={value[0]}-{value[1]}"
        if name != "rate" or value is None:
            return f"{name}={value!r}"
        bits, unit = (8e-6 * value, "mbit") if value < 125e6 else (8e-9 * value, "gbit")
        return f"{name}={bits:g}{unit}"

    @classmethod
    def names(cls, fact: str) -> list[str]:
        """The settings for which ``fact`` holds: ``same_on_all_ranks``, ``run_option``, ``server_option`` or
        ``some_transports``; see :func:`_setting`."""
        return [f.name for f in fields(cls) if f.metadata.get(fact)]

    def changed(self, fact: str) -> dict[str, Any]:
        """The settings for which ``fact`` holds (see :meth:`names`) and which the user changed from their defaults."""
        chosen = [f for f in fields(self) if f.name in self.given and f.metadata.get(fact)]
        return {f.name: getattr(self, f.name) for f in chosen if getattr(self, f.name) != f.default}

    @classmethod
    def load(cls, keywords: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
        """Merge the settings from all sources and check them. Keywords that are None count as not given.

        Raises:
            ConfigError: a setting is unknown or wrong; the message names the key, its source, the value and what is allowed.
        """
        known = {f.name: f for f in fields(cls) if f.metadata}
        values: dict[str, Any] = {}
        given: set[str] = set()
        environment = {key: value for key, value in environ.items() if key.startswith("COMMSCHED_") and key not in NOT_SETTINGS}
        for key in environ:
            if (meant := _misspelled(key, known)) is not None:
                raise ConfigError(f"{key} is not a setting; did you mean {meant}?")
        config = environ.get("COMMSCHED_CONFIG")
        sources: list[tuple[Callable[[str], str], Mapping[str, Any]]] = [
            (lambda key: f"{key} in {config}", _read_toml(config) if config else {}),
            (lambda key: f"COMMSCHED_{key.upper()}", {key[10:].lower(): value for key, value in environment.items()}),
            (lambda key: key, {key: value for key, value in keywords.items() if value is not None}),
        ]
        for place, (label, source) in enumerate(sources):
            for key, value in source.items():
                if key not in known:
                    raise ConfigError(f"{label(key)} is not a setting; {_hint(key, value, label)}")
                if value != "":
                    values[key] = known[key].metadata["parse"](value, label(key))
                    if place > 0 or "tuned" not in source:
                        given.add(key)
        return cls(**values, given=frozenset(given))

    def __post_init__(self) -> None:
        if self.flows > 1 and self.lane == "grpc":
            raise ConfigError(f"flows={self.flows} needs lane='tcp': gRPC has one connection between two processes")


#: How like ``COMMSCHED`` another prefix of a variable is, from 0 to 1, to be taken for it: COMSCHED and COMMSCHEDULER are.
_LIKE_OURS = 0.8


def _misspelled(variable: str, known: Collection[str]) -> str | None:
    """The variable that was likely meant by ``variable``, if that has not our prefix but almost, and then a setting."""
    if "COMMSCHED_" in variable:
        return None  # ours, or one of ours under another name, OLD_COMMSCHED_LOG, which switches it off
    parts = variable.upper().split("_")
    for end in (1, 2):  # COMSCHED_LOG, COMM_SCHED_LOG
        prefix, key = "".join(parts[:end]), "_".join(parts[end:])
        if difflib.SequenceMatcher(None, prefix, "COMMSCHED").ratio() < _LIKE_OURS:
            continue
        words = [*map(str.upper, known), *(name.removeprefix("COMMSCHED_") for name in NOT_SETTINGS)]
        if close := difflib.get_close_matches(key, words, 1, _LIKE_OURS):
            return f"COMMSCHED_{close[0]}"
    return None


def _hint(key: str, value: object, label: Callable[[str], str]) -> str:
    """The advice for whoever wrote ``key``, which is no setting."""
    if isinstance(value, Mapping):
        return "settings stand at the top of the file, and in no table"
    names = list(SettingsKeywords.__annotations__)
    close = nearest(key, names)
    if close is None:
        return f"there are: {', '.join(names)}"
    meant = label(close)
    return f"did you mean {close if ' in ' in meant else meant}?"


class SettingsKeywords(TypedDict, total=False):
    """The settings that a script may give as keywords, with their types, for editors and type checkers. A size is text with a
    unit or a number of bytes; None means: not given. :class:`Settings` describes them, and its parsers check their values."""

    transport: str | None
    servers: str | Sequence[str] | None
    lane: Literal["tcp", "grpc"] | None
    flows: int | str | None
    security: Literal["none", "tls"] | None
    order: Literal["auto", "agreed", "static"] | None
    collective: Literal["auto", "all_reduce", "rsag"] | None
    wire: Literal["none", "bfloat16", "float16"] | None
    hierarchy: Literal["auto", "on", "off"] | None
    partition: str | int | None
    credit: str | int | None
    fusion: str | int | None
    policy: str | None
    rate: str | None
    trace: str | Path | None
    trace_steps: str | int | None
    metrics: str | int | None
    log: Literal["warning", "info", "debug"] | None
    check_weights: int | None
    fail_after: float | None
    stall_after: float | None
    join_within: float | None
    tune: bool | str | Budget | None
    tune_out: str | Path | None
    tune_by: str | None
    tune_policies: str | Sequence[str] | None
    disable: bool | None
    control: str | None
    host: str | None
    job: str | None
    token: str | None
    token_file: str | Path | None
    certificates: str | Path | None
    rendezvous: str | Path | None


#: ``COMMSCHED_*`` variables that are not settings: the rank and world (see ``core/world.py``), the launcher's socket in an
#: elastic job, and the name of the TOML file.
NOT_SETTINGS = frozenset(
    {
        "COMMSCHED_CONFIG",
        "COMMSCHED_ELASTIC",
        "COMMSCHED_RANK",
        "COMMSCHED_WORLD_SIZE",
        "COMMSCHED_LOCAL_RANK",
        "COMMSCHED_LOCAL_WORLD_SIZE",
    }
)


def to_environ(keywords: Mapping[str, Any]) -> dict[str, str]:
    """The variables of the environment that set what ``keywords`` set, for processes that get no keywords.

    Raises:
        ConfigError: a setting is unknown or wrong, or no text says its value.
    """
    wanted = Settings.load(keywords, {})
    environ = {}
    for key, value in keywords.items():
        if value is None:
            continue
        variable = f"COMMSCHED_{key.upper()}"
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        try:
            is_same = getattr(Settings.load({key: text}, {}), key) == getattr(wanted, key)
        except ConfigError:
            is_same = False
        if not is_same:
            raise ConfigError(f"{key}={value!r} cannot be set by the environment; give it as the text of {variable}")
        environ[variable] = text
    return environ


def _read_toml(path: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"COMMSCHED_CONFIG={path!r} cannot be read: {error}") from error
