"""``commsched predict``: steps of a model on a cluster that is not there, by the bound and the simulator, beside DDP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..core.scheduler import SchedulerConfig
from ..core.standard_streams import say_result
from ..core.world import World
from ..settings import Settings, parse_bytes
from ..simulator import Cluster, Exchange, Rules, equal_workers, simulate
from ..simulator.lower_bound import clipped_bound, first_share
from ..simulator.profile import ITEMSIZE, LayerProfile, Profile
from ..simulator.scenario import DDP_BUCKET_MIB, bytes_factor, ddp_rules
from ..transports.collective.transport import EXCHANGE_UP_TO
from ..transports.open import Capabilities, choose
from ..tuner.auto import best_sizes, partition_count
from ..tuner.initial_guesses import before_first_step, seeds
from ..tuner.model import Model
from ..tuner.profiler import LinkEstimate
from ..tuner.result import size
from ..tuner.space import MIN_TELLING_BYTES, Space, max_ratio

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A cluster, and how gradients travel there. ``rate`` is that of every network card, in bytes per second and direction.
    ``overhead`` is that of a partition, or of a bucket of DDP, and ``latency`` that of a message, in seconds. ``halved``:
    commsched and DDP send 16 bits for 32. ``transport``: ``ps`` or ``gloo``. ``sizes``: those that are set; None: commsched
    chooses them."""

    workers: int
    rate: float
    servers: int = 0
    overhead: float = 50e-6
    latency: float = 50e-6
    clips: bool = False
    halved: bool = False
    transport: str = "ps"
    sizes: SchedulerConfig | None = None

    @property
    def ordered(self) -> bool:
        """Whether partitions are averaged by collectives, in one order."""
        return self.transport != "ps"


#: The values of ``--transport``. gloo stands for all collectives.
TRANSPORTS = ("auto", "ps", "gloo")


def transport_of(name: str, workers: int, servers: int, gloo: bool) -> str:
    """The transport of a job with ``transport=name``, one rank on each machine, and nothing else set. ``gloo``: its ranks have
    imported a PyTorch with gloo."""
    settings = Settings(transport=name, servers=("a server's address",) * servers)
    return choose(settings, World(world_size=workers), Capabilities(gloo=gloo)).name


def read_model(path: Path) -> Profile:
    """The layers and times in ``path``: a profile, or ``Session.stats`` of rank 0, as JSON.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    require_file(path)
    try:
        record = json.loads(path.read_text())
        if "world_size" in record:
            record = _of_stats(record)
        return Profile.from_record(record)
    except OSError as error:
        raise ConfigError(f"--model {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {path}: {error}") from error


def require_file(model: Path) -> None:
    if model.is_dir():
        raise ConfigError(f"--model {model} is a directory")
    if not model.exists():
        raise ConfigError(f"--model {model}: there is no such file")


def _of_stats(stats: Mapping[str, Any]) -> Row:
    if not stats["layers"]:
        raise ValueError("these statistics have no layers; take those of rank 0, after it has printed what communication costs")
    layers = [
        {
            "name": layer["name"],
            "shapes": [[max(1, round(layer["bytes"] / ITEMSIZE))]] if layer["bytes"] else [],
            "forward_seconds": layer["forward_seconds"],
            "backward_seconds": layer["backward_seconds"],
        }
        for layer in stats["layers"]
    ]
    rest = (stats["compute_seconds"] or 0.0) - sum(layer["forward_seconds"] + layer["backward_seconds"] for layer in layers)
    if rest > 0:  # outside of layers data is loaded, say: before the first layer, and it waits for nothing
        layers.insert(0, {"name": "before forward", "shapes": [], "forward_seconds": rest, "backward_seconds": 0.0})
    return {"model": "training", "layers": layers, "source": "measured"}


def predict(profile: Profile, questions: Sequence[Question], as_json: bool = False, plot: Path | None = None) -> int:
    """Print a row for each of ``questions`` as soon as it is known, and draw them to ``plot``. Returns the exit code.

    Raises:
        ConfigError: matplotlib is missing, or ``plot`` cannot be written.
    """
    if plot is not None:
        require_plot(plot)
    if not as_json:
        layers = sum(layer.nbytes > 0 for layer in profile.layers)
        overhead, latency = questions[0].overhead, questions[0].latency
        wire = ", which travel in 16 bits" if questions[0].halved else ""
        say_result(
            f"SIMULATED: {profile.model}, {size(profile.nbytes)} of gradients in {layers} layers{wire}, "
            f"{1e3 * profile.compute_seconds:.1f} ms of computation per step. A partition, and a bucket of DDP, costs\n"
            f"{1e3 * overhead:g} ms besides its bytes, which arrive {1e3 * latency:g} ms later. Hosts keep up with their links."
        )
        say_result(_line(_HEADINGS.values()))
    rows = []
    for question in questions:
        rows.append(answer(profile, question))
        if not as_json:
            say_result(_line(_cell(rows[-1][key]) for key in _HEADINGS))
    if as_json:
        say_result(json.dumps(rows, indent=2))
    elif (advice := _advice(profile, questions, rows)) is not None:
        say_result(advice)
    if plot is not None:
        from .predict_plot import draw

        draw(profile.model, rows, plot)
        if not as_json:
            say_result(f"the plot is in {plot}")
    return 0


#: Step times that differ by a smaller share count as equal.
_EQUAL = 0.02

#: The partition and the fusion of few, large messages, like DDP's buckets.
_LARGE = f"{DDP_BUCKET_MIB}MiB"


def _advice(profile: Profile, questions: Sequence[Question], rows: Sequence[Row]) -> str | None:
    """The way out of the row in which commsched is the slowest beside DDP; None if it is slower nowhere."""
    row, question = min(zip(rows, questions, strict=True), key=lambda pair: float(pair[0]["speedup"]))
    if row["speedup"] > 1 - _EQUAL:
        return None
    large = parse_bytes(_LARGE)
    sizes = SchedulerConfig(large, 4 * large, fusion_bytes=large)
    ways = {f"COMMSCHED_PARTITION={_LARGE} COMMSCHED_FUSION={_LARGE}": replace(question, sizes=sizes)}
    if question.ordered:
        ways["COMMSCHED_TRANSPORT=ps"] = replace(question, transport="ps")
    else:
        ways["COMMSCHED_TRANSPORT=gloo"] = replace(question, transport="gloo", servers=0)
    if not question.servers:
        ways[f"{question.workers} parameter servers"] = replace(question, transport="ps", servers=question.workers)
    found = {way: float(answer(profile, each)["commsched"]) for way, each in ways.items()}
    best = min(found, key=found.__getitem__)
    if found[best] > (1 - _EQUAL) * row["commsched"]:
        rest = "No other transport, servers or larger sizes help: DDP is the better choice there"
    else:
        rest = f"With {best} it takes {found[best]:.4g} ms"
    where = f"{row['workers']} workers and {row['gigabits']:.4g} Gbit/s"
    return f"commsched is slower than DDP at {where}: {row['commsched']:.4g} ms against {row['ddp']:.4g} ms. {rest}."


def require_plot(path: Path) -> None:
    """Check, before anything is simulated, that a plot can be drawn to ``path``. Raises ConfigError."""
    if find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib: pip install "commsched[report]"')
    from .predict_plot import FORMATS

    if path.suffix[1:].lower() not in FORMATS:
        raise ConfigError(f"--plot {path}: give the name an ending that says the format: {', '.join(sorted(FORMATS))}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no such directory")


_HEADINGS = {
    "workers": "workers",
    "gigabits": "Gbit/s",
    "transport": "transport",
    "rho": "rho",
    "bound": "bound ms",
    "commsched": "commsched ms",
    "ddp": "DDP ms",
    "speedup": "vs DDP",
    "possible": "possible",
    "exposed": "exposed",
    "sizes": "partition",
}


def answer(profile: Profile, question: Question) -> Row:
    """The row for one question. ``rho``: how many times as long as computation communication takes. ``exposed``: the share of
    commsched's step in which nothing is computed. Times are milliseconds."""
    halved = _halved(profile) if question.halved else profile
    factor = bytes_factor(question.workers, question.servers)
    per_byte = factor / question.rate
    forward = [layer.forward_seconds for layer in profile.layers]
    backward = [layer.backward_seconds for layer in profile.layers]
    comm = [per_byte * layer.nbytes for layer in halved.layers]
    bound = clipped_bound(forward, backward, comm, first_share(question.clips, question.servers > 0))
    servers = question.servers
    cluster = _cluster(question, servers, question.overhead if question.ordered else question.overhead / factor)
    ours, config = min(
        ((_seconds(halved, cluster, _rules(each, question)), each) for each in _sizes(halved, question, per_byte)),
        key=lambda found: found[0],
    )
    ddp = _seconds(halved, _cluster(question, 0, question.overhead), ddp_rules(2 if question.halved else 1))
    return {
        "workers": question.workers,
        "servers": servers,
        "transport": question.transport,
        "gigabits": 8 * question.rate / 1e9,
        "rho": sum(comm) / profile.compute_seconds,
        "bound": 1e3 * bound,
        "commsched": 1e3 * ours,
        "ddp": 1e3 * ddp,
        "speedup": ddp / ours,
        "possible": ddp / bound,
        "exposed": f"{100 * max(0.0, 1 - profile.compute_seconds / ours):.0f} %",
        "sizes": size(config.partition_bytes),
        "partition_bytes": config.partition_bytes,
        "credit_bytes": config.credit_bytes,
    }


def _rules(config: SchedulerConfig, question: Question) -> Rules:
    """A loop that clips waits for the norm of the averages, or for all of them where no transport knows the norm earlier."""
    if not question.ordered:
        return Rules(config, norm=question.clips)
    if not question.clips:
        return Rules(config, Exchange.ALL_REDUCE)
    if question.workers <= EXCHANGE_UP_TO:
        return Rules(config, Exchange.SPLIT, norm=True)
    return Rules(config, Exchange.ALL_REDUCE, barrier=True)


def _sizes(profile: Profile, question: Question, per_byte: float) -> list[SchedulerConfig]:
    """The sizes that a job has before its first step, and those that it chooses for itself if its measurements are exact."""
    if question.sizes is not None:
        return [question.sizes]
    if profile.nbytes < MIN_TELLING_BYTES:
        return [Settings().scheduler]
    workers, servers, ordered = question.workers, question.servers, question.ordered
    link = LinkEstimate(per_byte, question.overhead, question.latency)
    starts = seeds(profile, link, workers, servers=servers, ordered=ordered)
    partition, count = before_first_step(profile.nbytes, workers, servers=servers, ordered=ordered, rate=question.rate)
    first = SchedulerConfig(partition, count * partition)
    model = Model(profile, link, workers, servers=servers, ordered=ordered, anchor_bytes=starts[0].partition_bytes)
    space = Space(first, profile.nbytes, largest_ratio=max_ratio(workers, servers, ordered))
    shards = 1 if ordered else servers or workers
    return [
        first,
        best_sizes(model.predict, space, [first, *starts], ordered, count=partition_count(profile.manifest, shards)),
    ]


def _cluster(question: Question, servers: int, message_seconds: float) -> Cluster:
    detailed = question.workers <= _DETAILED and servers == question.servers
    times = {"latency_seconds": question.latency, "message_seconds": message_seconds}
    return equal_workers(question.workers, question.rate, servers, detailed=detailed, **times)


#: Up to so many workers, each is simulated by itself.
_DETAILED = 4


def _seconds(profile: Profile, cluster: Cluster, rules: Rules) -> float:
    if rules.exchange is not Exchange.PARAMETER_SERVER:  # workers in lock step are exact there
        cluster = replace(cluster, workers=(replace(cluster.workers[0], count=cluster.world_size),))
    return simulate(profile, cluster, rules).step_seconds[0]


def _halved(profile: Profile) -> Profile:
    """``profile`` with half the bytes and the same times."""
    layers = tuple(
        LayerProfile(
            layer.name,
            ((max(1, layer.nbytes // (2 * ITEMSIZE)),),) if layer.nbytes else (),
            layer.forward_seconds,
            layer.backward_seconds,
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _line(cells: Any) -> str:
    return "  ".join(str(cell).rjust(12 if "ms" in heading else 9) for cell, heading in zip(cells, _HEADINGS.values())).rstrip()


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
