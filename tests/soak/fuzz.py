"""Random and mutated input for everything that reads bytes from outside: only errors of ours, in bounded time and memory."""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from commsched.control.messages import Gather, Heartbeat, Leave, Message, ToRank0
from commsched.control.messages import decode as decode_message
from commsched.control.messages import encode as encode_message
from commsched.control.rendezvous import find
from commsched.control.roster import Roster
from commsched.core.errors import CommschedError
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.world import World
from commsched.settings import Settings
from commsched.simulator.profile import LayerProfile, Profile, read_profile
from commsched.transports.backends.ps.frame import (
    HEADER_BYTES,
    Damaged,
    Frame,
    FrameKind,
    WorkerHello,
    checksum,
    encode,
    json_frame,
)
from commsched.transports.backends.ps.frame import decode as decode_frame
from commsched.tuner.journal import Journal
from commsched.tuner.result import check_tuned

#: A single input may not take longer.
MAX_SECONDS = 1.0
#: The process may not grow by more over all inputs of a target.
MAX_GROWTH_BYTES = 64 * 2**20

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**31 - 1, 2**63, 2**70, 10**400, 1.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", "a", "../../x", "\0", "x" * 1000, "\ud800", "1e999", [], {}, [[]], [None], {"": {}}, [[[[[[[[]]]]]]]]),
)


class Target(NamedTuple):
    """``inputs`` of one kind, what reads them, and the errors that it may raise."""

    inputs: Callable[[random.Random], Any]
    read: Callable[[Any], object]
    allowed: tuple[type[BaseException], ...]


# --- inputs ---


def mutated(rng: random.Random, sample: bytes) -> bytes:
    """``sample`` with bytes changed, removed, repeated or added; sometimes something else altogether."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(200))
    data = bytearray(sample)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.randrange(1, 20)]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 20))
            case 3:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
            case 4:
                del data[at:]
    return bytes(data)


def hostile(rng: random.Random, value: Any) -> Any:
    """A JSON value like ``value``, with parts replaced by values that nobody expects there."""
    if rng.random() < 0.08:
        return rng.choice(HOSTILE)
    if isinstance(value, dict):
        changed = {key: hostile(rng, item) for key, item in value.items() if rng.random() > 0.03}
        if rng.random() < 0.05:
            changed[rng.choice(("", "pid", "x" * 50))] = rng.choice(HOSTILE)
        return changed
    if isinstance(value, list | tuple):
        items = [hostile(rng, item) for item in value if rng.random() > 0.03]
        return items + items if rng.random() < 0.03 else items
    return value


MANIFEST = Manifest((TensorSpec("a", (4, 2), "float32"), TensorSpec("b", (3,), "float16")))
FRAMES = (
    encode(json_frame(FrameKind.HELLO, WorkerHello(1, 2, 0).to_record())),
    encode(json_frame(FrameKind.GROUP, MANIFEST.to_record(), group=3)),
    encode(Frame(FrameKind.PUSH, 0, 5, 1, "float32", 8, 24, b"0123456789abcdef", 7)),
    encode(Frame(FrameKind.GOODBYE)),
    encode(json_frame(FrameKind.ERROR, {"type": "PeerLost", "message": "rank 1 is gone"})),
)
MESSAGES: tuple[Message, ...] = (Gather("gather 1", "[1]"), ToRank0("t", '{"a": 1}'), Leave(), Heartbeat())
PROFILE = Profile("tiny", (LayerProfile("a", ((4, 2), (2,)), 0.1, 0.2),), "made up").to_record()
RENDEZVOUS = {"address": "127.0.0.1:4242", "token": "0" * 64, "pid": 1, "started": 7}
JOURNAL_KEY = {"model": "m", "ranks": 2}


def _text(rng: random.Random, value: Any) -> bytes:
    """JSON of something like ``value``, at times mutated as text too."""
    data = json.dumps(hostile(rng, value)).encode("utf-8", "surrogatepass")
    return mutated(rng, data) if rng.random() < 0.3 else data


def _file(data: bytes, read: Callable[[Path], object]) -> object:
    with tempfile.TemporaryDirectory(prefix="commsched-soak-") as directory:
        path = Path(directory) / "file"
        path.write_bytes(data)
        path.chmod(0o600)
        return read(path)


def _find(path: Path) -> object:
    settings = Settings.load({"join_within": "0.001"}, {})
    return find(World(1, 2, 1, 2, "fuzz"), settings, path)


def _read_tuned(path: Path) -> object:
    settings = Settings.load({}, {"COMMSCHED_CONFIG": str(path)})
    return check_tuned(settings.tuned, 2, 1, "ps", "loopback") if settings.tuned is not None else None


def _read_journal(path: Path) -> object:
    journal = Journal(path, JOURNAL_KEY)
    journal.close()
    return journal.trials


def _tuned(rng: random.Random) -> bytes:
    groups = json.dumps(hostile(rng, ["ab", "cd"]))
    text = 'partition = "1MB"\ncredit = 4\n[tuned]\nranks = 2\nhosts = 1\ntransport = "ps"\nlink = "loopback"\nmodel = "m"\n'
    return mutated(rng, f"{text}groups = {groups}\n".encode("utf-8", "surrogatepass"))


def _conversation(rng: random.Random) -> list[tuple[int, bytes]]:
    """What some connections say to rank 0's roster, in turn."""
    said = []
    for _ in range(rng.randint(1, 30)):
        message = encode_message(rng.choice(MESSAGES))
        said.append((rng.randrange(4), mutated(rng, message) if rng.random() < 0.3 else message))
    return said


def _frame(rng: random.Random) -> bytes:
    """Half of them have right checksums, as a peer that means harm would send them."""
    data = mutated(rng, rng.choice(FRAMES))
    if len(data) < HEADER_BYTES or rng.random() < 0.5:
        return data
    fields = data[: HEADER_BYTES - 16] + struct.pack("<Q", checksum(data[HEADER_BYTES:]))
    return fields + struct.pack("<Q", checksum(fields)) + data[HEADER_BYTES:]


def _read_frame(data: bytes) -> object:
    frame = decode_frame(data)
    return frame if frame.kind in (FrameKind.PUSH, FrameKind.RESULT, FrameKind.GOODBYE, FrameKind.ACK) else frame.json()


def _hear(said: list[tuple[int, bytes]]) -> None:
    roster = Roster(2, "host", 1, fail_after_seconds=1.0, join_within_seconds=5.0, now=0.0)
    for now, (connection, data) in enumerate(said):
        try:
            message = decode_message(data)
        except CommschedError as error:
            roster.invalid_message(connection, error)  # type: ignore[arg-type]
            continue
        roster.received(connection, message, float(now))


TARGETS: Mapping[str, Target] = {
    "ps frames": Target(_frame, _read_frame, (CommschedError, Damaged)),
    "ps hello": Target(lambda rng: hostile(rng, WorkerHello(1, 2, 0).to_record()), WorkerHello.from_record, (CommschedError,)),
    "manifest": Target(
        lambda rng: hostile(rng, MANIFEST.to_record()),
        lambda record: Manifest.from_record(record).buffer_bytes,
        (CommschedError,),
    ),
    "control messages": Target(
        lambda rng: mutated(rng, encode_message(rng.choice(MESSAGES))), decode_message, (CommschedError,)
    ),
    "control messages, hostile JSON": Target(
        lambda rng: _text(rng, json.loads(encode_message(rng.choice(MESSAGES)))), decode_message, (CommschedError,)
    ),
    "roster": Target(_conversation, _hear, ()),
    "rendezvous file": Target(lambda rng: _text(rng, RENDEZVOUS), lambda data: _file(data, _find), (CommschedError,)),
    "tuned file": Target(_tuned, lambda data: _file(data, _read_tuned), (CommschedError,)),
    "journal": Target(
        lambda rng: b"\n".join(_text(rng, {"schema": 1, "key": JOURNAL_KEY, "phase": "search"}) for _ in range(3)) + b"\n",
        lambda data: _file(data, _read_journal),
        (CommschedError,),
    ),
    "profile": Target(lambda rng: _text(rng, PROFILE), lambda data: _file(data, read_profile), (ValueError,)),
    "settings file": Target(
        lambda rng: mutated(rng, b'partition = "4MB"\ncheck_weights = 10\nservers = ["a:1"]\nrate = "1gbit"\n'),
        lambda data: _file(data, lambda path: Settings.load({}, {"COMMSCHED_CONFIG": str(path)})),
        (CommschedError, tomllib.TOMLDecodeError),
    ),
}

#: Small inputs that ask for much; each must be refused.
BOMBS: Mapping[str, tuple[str, Any]] = {
    "5 MB of [": ("control messages", b"[" * 5_000_000),
    "5 MB of [ in a hello": ("ps frames", encode(Frame(FrameKind.HELLO, payload=b"[" * 5_000_000))),
    "a world of 2^31 - 1 ranks": ("ps hello", {**WorkerHello(1, 2, 0).to_record(), "world_size": 2**31 - 1}),
    "sizes of 4,300 digits": ("manifest", [["a", [10**4299] * 100, "float32"]] * 10),
    "a number of 4 million digits": ("control messages", b'{"kind": ' + b"9" * 4_000_000 + b"}"),
}


# --- running ---


def _reads(target: Target, value: Any, must_refuse: bool = False) -> str | None:
    """What is wrong with how ``target`` reads ``value``; None: nothing."""
    began = time.monotonic()
    try:
        target.read(value)
        if must_refuse:
            return "it is not refused"
    except target.allowed:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    seconds = time.monotonic() - began
    return f"it took {seconds:.1f} s" if seconds > MAX_SECONDS else None


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _results(inputs: int, seed: int) -> Iterator[tuple[str, int, Counter[str], Any, int]]:
    for name, target in TARGETS.items():
        rng = random.Random(f"{seed} {name}")
        wrong: Counter[str] = Counter()
        first: Any = None
        before = _peak_bytes()
        count = inputs if name not in ("rendezvous file", "tuned file", "journal", "profile", "settings file") else inputs // 10
        for _ in range(count):
            value = target.inputs(rng)
            if (what := _reads(target, value)) is not None:
                first = value if not wrong else first
                wrong[what] += 1
        yield name, count, wrong, first, _peak_bytes() - before
    for name, (target_name, value) in BOMBS.items():
        before = _peak_bytes()
        what = _reads(TARGETS[target_name], value, must_refuse=True)
        yield name, 1, Counter([what] if what else []), None, _peak_bytes() - before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inputs", type=int, default=50_000, help="for each target; a tenth where files are written")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> bool:
    """A row for each target; whether all is as promised."""
    print("| target | inputs | growth MB | other than our errors |\n|---|---|---|---|")
    holds = True
    for name, count, wrong, first, growth in _results(args.inputs, args.seed):
        bad = bool(wrong) or growth > MAX_GROWTH_BYTES
        holds &= not bad
        shown = "; ".join(f"{what} ({number})" for what, number in wrong.most_common(3)) or "none"
        print(f"| {name} | {count} | {growth / 2**20:.0f} | {shown} |", flush=True)
        if first is not None:
            print(f"  first such input: {str(first)[:300]}")
    return holds
