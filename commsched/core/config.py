"""Settings: keyword arguments, then ``COMMSCHED_*``, then a TOML file, then defaults. All parsing of settings is here."""

from __future__ import annotations

import difflib
import math
import re
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .policies import policy_names

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}

#: Largest partition: bounds what anybody may send us in one message before a manifest is known.
MAX_PARTITION_BYTES = 256 * 2**20


def parse_bytes(value: object, key: str = "size") -> int:
    """``"4MB"`` (10^6), ``"4MiB"`` (2^20) or a number of bytes, as an int of at least 1.

    Raises:
        ConfigError: names ``key``, the value and the form wanted.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", str(value).strip().upper())
    size = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    if not 0.5 < size < math.inf:
        raise ConfigError(f"{key}={value!r} is not a size; write it like 4MB, 512KiB or 65536")
    return round(size)


def parse_rate(value: object, key: str = "rate") -> float:
    """``"200mbit"`` (bits per second, as ``tc`` writes it: kbit, mbit, gbit) as bytes per second.

    Raises:
        ConfigError: names ``key``, the value and the form wanted.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])?bit(?:/s|ps)?", str(value).strip().lower())
    rate = float(match[1]) * _UNITS[(match[2] or "").upper()] / 8 if match else 0.0
    if not 0 < rate < math.inf:
        raise ConfigError(f"{key}={value!r} is not a rate; write it like 200mbit or 1gbit")
    return rate


def parse_seconds(value: object, key: str = "seconds") -> float:
    """A positive number of seconds, with or without an ``s`` at the end.

    Raises:
        ConfigError: names ``key``, the value and the form wanted.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*s?", str(value).strip())
    if not match or not 0 < float(match[1]) <= threading.TIMEOUT_MAX:
        raise ConfigError(f"{key}={value!r} is not a time; write it in seconds, like 10 or 2.5")
    return float(match[1])


def parse_switch(value: object, key: str = "switch") -> bool:
    """True or False, or the words 1, 0, true, false, yes, no, on, off.

    Raises:
        ConfigError: names ``key``, the value and the form wanted.
    """
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off", ""):
        return False
    raise ConfigError(f"{key}={value!r} is neither on nor off; write 1 or 0")


def parse_address(value: object, key: str = "address") -> str:
    """``"host:port"`` with a port of 0 to 65535; an IPv6 host stands in brackets.

    Raises:
        ConfigError: names ``key``, the value and the form wanted.
    """
    text = str(value).strip()
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/,\[\]]+):(\d{1,5})", text)
    if not match or int(match[2]) > 65535:
        raise ConfigError(f"{key}={value!r} is not an address; write it like 10.0.0.7:29600")
    return text


def _addresses(value: object, key: str) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else [part for part in str(value).split(",") if part.strip()]
    return tuple(parse_address(part, key) for part in parts)


def _partition(value: object, key: str) -> int:
    size = parse_bytes(value, key)
    if size > MAX_PARTITION_BYTES:
        raise ConfigError(f"{key}={value!r} is more than the largest partition, {MAX_PARTITION_BYTES // 2**20}MiB")
    return size


def _policy(value: object, key: str) -> str:
    if value not in policy_names():
        raise ConfigError(f"{key}={value!r} is unknown; there are: {', '.join(policy_names())}")
    return str(value)


def _one_of(*words: str) -> Callable[[object, str], str]:
    def parse(value: object, key: str) -> str:
        if value not in words:
            raise ConfigError(f"{key}={value!r} is unknown; there are: {', '.join(words)}")
        return str(value)

    return parse


def _text(value: object, key: str) -> str:
    return str(value)


@dataclass(frozen=True, slots=True)
class Budget:
    """How long tuning may take, whichever comes first; it may end earlier. None: no limit of that kind."""

    trials: int | None = None
    steps: int | None = None
    seconds: float | None = None


#: Of ``tune=1``: what the searcher needs on most models, and the comparison at the end.
DEFAULT_BUDGET = Budget(trials=12)


def _budget(value: object, key: str) -> Budget | None:
    """On or off, or ``"90s"``, ``"500 steps"``, ``"20 trials"``."""
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
    raise ConfigError(f"{key}={value!r} is no budget; write 1, 0, or how long to tune, like 90s, 500steps or 20trials")


def _policies(value: object, key: str) -> tuple[str, ...]:
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return tuple(_policy(str(part).strip(), key) for part in parts)


def _tuned(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r} is not the table that commsched tune writes")
    return dict(value)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What may change while training runs; swapped whole, at a step number all ranks agreed on."""

    partition_bytes: int = 4_000_000
    credit_bytes: int = 16_000_000
    policy: str = "priority"
    fusion_bytes: int | None = None  # small neighbours are merged up to this; None: up to partition_bytes

    def to_record(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def parse(
        cls,
        partition: object = 4_000_000,
        credit: object = 16_000_000,
        policy: object = "priority",
        fusion: object = None,
    ) -> SchedulerConfig:
        """From what users write, such as ``partition="4MB"``.

        Raises:
            ConfigError: names the key, the value and what is allowed.
        """
        return cls(
            _partition(partition, "partition"),
            parse_bytes(credit, "credit"),
            _policy(policy, "policy"),
            None if fusion is None else parse_bytes(fusion, "fusion"),
        )


def _setting(parse: Callable[[object, str], Any], default: Any, help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a user may set. Each field is the keyword of ``commsched.init`` and, as ``COMMSCHED_<NAME>``, the
    environment variable and, in lower case, the key in the TOML file that ``COMMSCHED_CONFIG`` names."""

    transport: str = _setting(_text, "auto", "the way gradients travel: auto, ps, gloo, mpi, nccl")
    servers: tuple[str, ...] = _setting(_addresses, (), "parameter servers, host:port,...; none: every rank hosts a shard")
    lane: str = _setting(_one_of("tcp", "grpc"), "tcp", "what carries gradients to parameter servers: tcp, grpc")
    order: str = _setting(
        _one_of("agreed", "static"),
        "agreed",
        "order of collectives: agreed (in every step), static (without messages, once it repeats itself)",
    )
    wire: str = _setting(
        _one_of("none", "bfloat16", "float16"),
        "none",
        "dtype that float32 gradients travel as: none, bfloat16, float16 (a host's sum above 65504 becomes infinite)",
    )
    hierarchy: str = _setting(
        _one_of("auto", "on", "off"),
        "auto",
        "sum over the ranks of a host first, and let one of them use the network: auto (if there are several hosts), on, off",
    )
    partition: int = _setting(_partition, 4_000_000, "largest partition, such as 4MB")
    credit: int = _setting(parse_bytes, 16_000_000, "bytes committed to the network at a time, such as 16MB")
    fusion: int | None = _setting(parse_bytes, None, "small neighbours are merged up to this; none: up to the partition")
    policy: str = _setting(_policy, "priority", "order of ready partitions: priority, fifo, rsag")
    rate: float | None = _setting(parse_rate, None, "most that a rank may send, such as 200mbit; none: no cap")
    trace: str | None = _setting(_text, None, "directory for a timeline of every task; none: no timeline")
    log: str | None = _setting(
        _one_of("warning", "info", "debug"),
        None,
        "what is said of the job: warning, info, debug; none: one line when it begins, and warnings",
    )
    fail_after: float = _setting(parse_seconds, 10.0, "seconds of silence after which a rank or server is given up")
    join_within: float = _setting(parse_seconds, 60.0, "seconds within which all ranks must have joined")
    tune: Budget | None = _setting(  # noqa: RUF009 - Budget is frozen
        _budget, None, "look for a better partition and credit in training: 1, or for 90s, 500steps, 20trials"
    )
    tune_out: str | None = _setting(_text, None, "file for what tuning found, such as tuned.toml; none: it is only logged")
    tune_by: str = _setting(_text, "bayes", "how to search: bayes, grid, random, sgd")
    tune_policies: tuple[str, ...] = _setting(_policies, (), "policies to choose from in tuning; none: the one that is set")
    tune_end: str | None = _setting(_text, None, "file for why tuning ended without a result; commsched tune sets it")
    tuned: Mapping[str, Any] | None = _setting(_tuned, None, "the jobs that a tuned file is for: in the file only")
    disable: bool = _setting(parse_switch, False, "1: train exactly as without commsched")
    control: str | None = _setting(parse_address, None, "host:port where rank 0 listens; needed across machines")
    host: str | None = _setting(_text, None, "address other machines reach this rank at; none: found by itself")
    token: str | None = _setting(_text, None, "the job's secret; needed across machines")
    token_file: str | None = _setting(_text, None, "a file of mode 0600 that holds the token")
    rendezvous: str | None = _setting(_text, None, "file where rank 0 tells its address to ranks of the same machine")
    #: Names of those that somebody set, which tuning leaves as they are. A tuned file's are a place to begin.
    given: frozenset[str] = frozenset()

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(self.partition, self.credit, self.policy, self.fusion)

    @classmethod
    def load(cls, keywords: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
        """Merge and check. Keywords that are None count as not given.

        Raises:
            ConfigError: names the key, where it came from, the value and what is allowed.
        """
        known = {f.name: f for f in fields(cls) if f.metadata}
        values: dict[str, Any] = {}
        given: set[str] = set()
        environment = {key: value for key, value in environ.items() if key.startswith("COMMSCHED_") and key not in NOT_SETTINGS}
        config = environ.get("COMMSCHED_CONFIG")
        sources: list[tuple[Callable[[str], str], Mapping[str, Any]]] = [
            (lambda key: f"{key} in {config}", _read_toml(config) if config else {}),
            (lambda key: f"COMMSCHED_{key.upper()}", {key[10:].lower(): value for key, value in environment.items()}),
            (lambda key: key, {key: value for key, value in keywords.items() if value is not None}),
        ]
        for place, (label, source) in enumerate(sources):
            for key, value in source.items():
                if key not in known:
                    close = difflib.get_close_matches(key, known, 1)
                    hint = f"did you mean {label(close[0])}?" if close else f"there are: {', '.join(known)}"
                    raise ConfigError(f"{label(key)} is not a setting; {hint}")
                if value != "":
                    values[key] = known[key].metadata["parse"](value, label(key))
                    if place > 0 or "tuned" not in source:
                        given.add(key)
        return cls(**values, given=frozenset(given))


#: Variables of ours that are not settings: the world (see ``world.py``), and the name of the file.
NOT_SETTINGS = frozenset(
    {
        "COMMSCHED_CONFIG",
        "COMMSCHED_RANK",
        "COMMSCHED_WORLD_SIZE",
        "COMMSCHED_LOCAL_RANK",
        "COMMSCHED_LOCAL_WORLD_SIZE",
    }
)


def _read_toml(path: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"COMMSCHED_CONFIG={path!r} cannot be read: {error}") from error
