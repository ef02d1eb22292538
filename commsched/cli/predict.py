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
from ..core.standard_streams import say_out
from ..simulator import Cluster, Exchange, Rules, equal_workers, simulate
from ..simulator.lower_bound import clipped_bound, first_share
from ..simulator.profile import ITEMSIZE, LayerProfile, Profile
from ..simulator.scenario import bytes_factor, ddp_rules
from ..tuner.auto import best_sizes
from ..tuner.initial_guesses import seeds
from ..tuner.model import Model
from ..tuner.profiler import LinkEstimate
from ..tuner.result import size
from ..tuner.space import Space, max_ratio

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A cluster, and how gradients travel there. ``rate`` is that of every network card, in bytes per second and direction.
    ``overhead`` and ``latency`` are those of a message, in seconds. ``halved``: commsched sends 16 bits for 32."""

    workers: int
    rate: float
    servers: int = 0
    overhead: float = 50e-6
    latency: float = 50e-6
    clips: bool = False
    halved: bool = False


def read_model(path: Path) -> Profile:
    """The layers and times in ``path``: a profile, or ``Session.stats`` of rank 0, as JSON.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    try:
        record = json.loads(path.read_text())
        if "world_size" in record:
            record = _of_stats(record)
        return Profile.from_record(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {path}: {error}") from error


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
        require_matplotlib()
    if not as_json:
        say_out(
            f"SIMULATED: {profile.model}, {size(profile.nbytes)} of gradients in {len(profile.layers)} layers, "
            f"{1e3 * profile.compute_seconds:.1f} ms of computation per step. A message costs {questions[0].overhead:g} s\n"
            f"besides its bytes and arrives {questions[0].latency:g} s after it has left. Hosts keep up with their links."
        )
        say_out(_line(_HEADINGS.values()))
    rows = []
    for question in questions:
        rows.append(answer(profile, question))
        if not as_json:
            say_out(_line(_cell(rows[-1][key]) for key in _HEADINGS))
    if as_json:
        say_out(json.dumps(rows, indent=2))
    if plot is not None:
        from .predict_plot import draw

        draw(profile.model, rows, plot)
        if not as_json:
            say_out(f"the plot is in {plot}")
    return 0


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib: pip install "commsched[report]"')


_HEADINGS = {
    "workers": "workers",
    "gigabits": "Gbit/s",
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
    cluster = _cluster(question, servers, question.overhead / factor)
    ours, config = min(
        ((_seconds(halved, cluster, Rules(each, norm=question.clips)), each) for each in _sizes(halved, question, per_byte)),
        key=lambda found: found[0],
    )
    ddp = _seconds(profile, _cluster(question, 0, question.overhead), ddp_rules())
    return {
        "workers": question.workers,
        "servers": servers,
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


def _sizes(profile: Profile, question: Question, per_byte: float) -> list[SchedulerConfig]:
    """The sizes that a job chooses for itself if its measurements are exact, and the same partitions with credit for all
    shards."""
    link = LinkEstimate(per_byte, question.overhead, question.latency)
    starts = seeds(profile, link, question.workers, servers=question.servers)
    model = Model(profile, link, question.workers, servers=question.servers, anchor_bytes=starts[0].partition_bytes)
    ratio = max_ratio(question.workers, question.servers)
    best = best_sizes(model.predict, Space(starts[0], profile.nbytes, largest_ratio=ratio), starts)
    shards = question.servers or question.workers
    credits = (best.credit_bytes, *(lanes * best.partition_bytes for lanes in (shards + 1, 2 * shards)))
    return [replace(best, credit_bytes=min(credit, max(best.credit_bytes, profile.nbytes))) for credit in credits]


def _cluster(question: Question, servers: int, message_seconds: float) -> Cluster:
    detailed = question.workers <= _DETAILED and servers == question.servers
    times = {"latency_seconds": question.latency, "message_seconds": message_seconds}
    return equal_workers(question.workers, question.rate, servers, detailed=detailed, **times)


#: Up to so many workers, each is simulated by itself.
_DETAILED = 4


def _seconds(profile: Profile, cluster: Cluster, rules: Rules) -> float:
    if rules.exchange is Exchange.ALL_REDUCE:  # workers in lock step are exact there
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
