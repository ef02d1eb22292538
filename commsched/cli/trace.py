"""``commsched trace``: a timeline in numbers, layer by layer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..core.errors import ConfigError, error_text
from ..core.standard_streams import say_result
from ..session.trace import read_file
from ..session.trace_events import TRACKS
from ..tuner.result import size

_Event = Mapping[str, Any]

#: The tracks on which tasks appear.
_OF_TASKS = ("queue", "send", "reply")


@dataclass
class _Layer:
    """The partitions that begin in one tensor, by step. Times are milliseconds from the beginning of the step."""

    name: str
    # By partition, too, which may be two tasks.
    nbytes: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    ready: dict[int, float] = field(default_factory=dict)
    sent: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    needed: dict[int, float] = field(default_factory=dict)
    partitions: set[int] = field(default_factory=set)


def summarise(path: Path, rank: int | None = None, as_json: bool = False) -> int:
    """Print when the gradients of each layer were ready, sent, averaged and needed, as medians over steps, and what was waited
    for. Returns 0.

    Raises:
        ConfigError: there is no such timeline, or it has no steps of that rank.
    """
    events = _read(path)
    ranks = sorted({event["pid"] for event in events})
    if rank is None and ranks:
        rank = ranks[0]
    own = [event for event in events if event["pid"] == rank]
    steps = {(each["args"]["group"], each["args"]["step"]): each for each in own if each["cat"] == "step"}
    if not steps:
        raise ConfigError(f"{path} has no steps of rank {rank}; it has ranks {', '.join(map(str, ranks)) or 'none'}")
    main = max({group for group, _ in steps}, key=lambda group: sum(each == group for each, _ in steps))
    numbers = sorted(step for group, step in steps if group == main)
    whole = numbers[:-1] or numbers  # the last one has no next one that ends it
    found = {
        "rank": rank,
        "ranks": len(ranks),
        "first_step": numbers[0],
        "last_step": numbers[-1],
        "step_ms": median(steps[main, step]["dur"] / 1e3 for step in whole),
        "layers": _layers(own, steps),
        "waits": _waits(own, [steps[main, step] for step in whole]),
    }
    if as_json:
        say_result(json.dumps(found, indent=2))
    else:
        for line in _table(found):
            say_result(line)
    return 0


def _read(path: Path) -> list[_Event]:
    where = path / "trace.json" if path.is_dir() else path
    try:
        events = read_file(where)["traceEvents"]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} is no timeline of commsched: {error_text(error)}") from error
    bars: list[_Event] = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    if not all(map(_is_ours, bars)) or (bars and all(event["cat"] not in TRACKS for event in bars)):
        raise ConfigError(f"{where} is no timeline of commsched: another program has written its events")
    return bars


def _is_ours(event: _Event) -> bool:
    """Whether ``event`` is a bar as commsched writes it: other programs write events in this format, too."""
    args, kind = event.get("args"), event.get("cat")
    if not isinstance(args, dict) or not isinstance(kind, str) or not isinstance(event.get("name"), str):
        return False
    whole = [event.get("pid")]
    if kind in ("step", *_OF_TASKS):
        whole += [args.get("group"), args.get("step")]
    if kind in _OF_TASKS:
        whole += [args.get("partition"), args.get("bytes")]
        tensors = args.get("tensors")
        if not isinstance(tensors, list) or not tensors or not isinstance(tensors[0], str):
            return False
    times = [event.get("ts"), event.get("dur"), args.get("needed_ms_after_ready", 0.0)]
    return all(isinstance(each, int) for each in whole) and all(isinstance(each, int | float) for each in times)


def _layers(events: Sequence[_Event], steps: Mapping[tuple[int, int], _Event]) -> list[dict[str, Any]]:
    layers: dict[tuple[int, str], _Layer] = {}
    for event in events:
        args = event["args"]
        step = steps.get((args.get("group", -1), args.get("step", -1)))
        if event["cat"] not in _OF_TASKS or step is None:
            continue
        layer = layers.setdefault((args["group"], args["tensors"][0]), _Layer(event["name"]))
        layer.name = max(layer.name, event["name"], key=len)  # the last piece of a tensor may have others behind it
        number = args["step"]
        begins, ends = ((event["ts"] + more - step["ts"]) / 1e3 for more in (0.0, event["dur"]))
        if event["cat"] == "queue":
            layer.partitions.add(args["partition"])
            layer.nbytes[number][args["partition"]] = args["bytes"]
            layer.ready[number] = min(begins, layer.ready.get(number, begins))
            if "needed_ms_after_ready" in args:
                needed = begins + args["needed_ms_after_ready"]
                layer.needed[number] = min(needed, layer.needed.get(number, needed))
        else:
            times = layer.sent if event["cat"] == "send" else layer.done
            times[number] = max(ends, times.get(number, ends))
    return [
        {
            "name": layer.name,
            "group": group,
            "bytes": max((sum(each.values()) for each in layer.nbytes.values()), default=0),
            "partitions": len(layer.partitions),
            **{
                f"{what}_ms": median(times.values()) if times else None
                for what, times in (
                    ("ready", layer.ready),
                    ("sent", layer.sent),
                    ("done", layer.done),
                    ("needed", layer.needed),
                )
            },
        }
        for (group, _), layer in sorted(layers.items(), key=lambda item: (item[0][0], min(item[1].partitions, default=0)))
    ]


def _waits(events: Sequence[_Event], steps: Sequence[_Event]) -> list[dict[str, Any]]:
    """The waits of the engine by tensor, in milliseconds of one of ``steps``, the longest first."""
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    waited: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["cat"] == "wait" and begin <= event["ts"] < end:  # in whichever group: its steps have other numbers
            waited[event["name"]] += event["dur"] / 1e3
    longest = sorted(waited.items(), key=lambda item: -item[1])
    return [{"name": name, "ms": total / len(steps)} for name, total in longest]


def _table(found: Mapping[str, Any]) -> list[str]:
    total = sum(wait["ms"] for wait in found["waits"])
    steps = f"steps {found['first_step']} to {found['last_step']}"
    lines = [
        f"rank {found['rank']} (the file has {found['ranks']}), {steps}: {found['step_ms']:.1f} ms each, of which the engine "
        f"waits {total:.1f} ms",
        "Medians, in ms from the first gradient of the step. An average that is done after it is needed is waited for.",
        "",
    ]
    width = min(48, max([len("layer"), *(len(layer["name"]) for layer in found["layers"])]))
    lines.append(f"{'layer':{width}}  {'size':>9}  {'parts':>5}" + "".join(f"{name:>9}" for name in _TIMES))
    for layer in found["layers"]:
        times = "".join(_time(layer[f"{name}_ms"]) for name in _TIMES)
        late = layer["needed_ms"] is not None and layer["done_ms"] is not None and layer["done_ms"] > layer["needed_ms"]
        name = layer["name"] if len(layer["name"]) <= width else layer["name"][: width - 1] + "…"
        lines.append(
            f"{name:{width}}  {size(layer['bytes']):>9}  {layer['partitions']:>5}{times}{'  waited for' if late else ''}"
        )
    waits = [f"{wait['name']} {wait['ms']:.2f}" for wait in found["waits"][:_WAITS] if wait["ms"] >= _LEAST_MS]
    lines += ["", f"Waited for, in ms of a step: {', '.join(waits) or 'nothing'}"]
    return lines


_TIMES = ("ready", "sent", "done", "needed")
_WAITS, _LEAST_MS = 8, 0.01


def _time(milliseconds: float | None) -> str:
    return f"{'-' if milliseconds is None else f'{milliseconds:.1f}':>9}"
