"""One measured run: several systems train in turn in one job, on one network. The commands ``train`` and ``sweep`` share it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

from commsched import ConfigError
from commsched.core.order.static import FREEZE_STEPS
from commsched.core.world import World
from commsched.settings import Settings, parse_rate, parse_seconds
from commsched.simulator.scenario import bytes_factor
from commsched.transports import users_of
from commsched.transports.open import Capabilities, choose

from .. import systems
from ..harness.arguments import CLIPS, add_options, at_least, check_settings, require_extra, setting
from ..harness.job import Job, require_links, require_no_launcher, run_job
from ..harness.links import Links, require_capped, why_not_shaped
from ..harness.progress import relayed_lines
from ..harness.results import commit
from ..harness.scaling import Scaling, scale
from ..harness.system import Carrier
from ..systems import SYSTEMS, SystemSpec, carrier_of_job, parse
from ..workloads import load_profile, real_model_names

#: A configuration changes between two steps, and the plan of partitions may change a step later. The step after that still
#: waits for messages from before.
MIN_SETTLE_STEPS = 3


@dataclass(frozen=True)
class TrainOptions:
    """The options of a measurement. Texts are as on the command line, so that a record of the options is a record of the
    command.

    The bytes, times and rates of EMULATED models are scaled together. The CPU cost of messages and bytes is this machine's and
    is not scaled; ``host_cores`` of a row says what it would be on the cluster that the row stands for.

    Args:
        model: a name from ``bench.workloads``, or a profile's ``.json`` file.
        real: use the reduced model with real arithmetic, not EMULATED layers.
        device: for REAL models, the kind of the device that computes: ``"cpu"`` or ``"cuda"``.
        workers: number of ranks; each has a process and a host of its own.
        servers: number of separate parameter servers, or ``"n"`` for as many as workers; ``"0"`` means a shard on every rank.
        bandwidth: rate of every link (``"500mbit"``), or one rate for each host: workers first, then servers. None means
            loopback.
        flow_bandwidth: rate of each TCP connection (``"100mbit"``) on these links; None means no cap. T* is that of the whole
            link.
        rho: for EMULATED models, communication time over computation time at the nominal bandwidth.
        megabytes: for EMULATED models, size of the gradients after scaling; None means unscaled for uniform, 48 for others.
        systems: names of files in ``bench/systems``. A system on commsched may also name its transport (``bench.systems``):
            ``commsched:gloo+rsag``.
        rounds: number of turns of each system.
        steps: number of steps that count in each turn.
        settle: number of steps, at least 3, before them that do not count; an order that may be static adds 7.
        transport: transport of systems on commsched that do not name one; ``"auto"`` means the one that a job takes that sets
            none.
        lane: lane of the parameter server's bytes; None means the default.
        flows: connections between a rank and each shard or server.
        partition, credit: sizes for systems on commsched, such as ``"1MB"``; with ``"auto"`` they choose themselves, as in a
            job that does not set them.
        clip: how every loop uses all averages before an update: ``"norm"`` (``clip_grad_norm_``), ``"scaler"``
            (``GradScaler``), or None.
        compile: whether the forward of every system is compiled by ``torch.compile``. T* is that of the uncompiled model.
        timeout_seconds: time limit of the whole job.
    """

    model: str = "uniform"
    real: bool = False
    device: str = "cpu"
    workers: int = 2
    servers: str = "0"
    bandwidth: str | None = None
    flow_bandwidth: str | None = None
    rho: float = 1.0
    megabytes: float | None = None
    systems: tuple[str, ...] = ("ddp", "fifo", "commsched")
    rounds: int = 3
    steps: int = 5
    settle: int = 3
    transport: str = "auto"
    lane: str | None = None
    flows: int = 1
    partition: str = "auto"
    credit: str = "auto"
    clip: str | None = None
    compile: bool = False
    timeout_seconds: float = 1200.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = TrainOptions()

    def add(heading: str, *names: str) -> argparse._ArgumentGroup:
        group = parser.add_argument_group(heading)
        add_options(group, **{name: getattr(default, name) for name in names})
        return group

    group = add("what trains", "model")
    group.add_argument("--real", action="store_true", help="train the reduced model with real arithmetic, not EMULATED layers")
    device_help = "what computes --real: cpu, or cuda, the GPU of the rank's number on its machine (default: cpu)"
    group.add_argument("--device", choices=("cpu", "cuda"), default=default.device, help=device_help)
    clip_help = "every loop clips by the norm of all averages, or has a GradScaler (scaler); T* is the bound of such loops"
    group.add_argument("--clip", nargs="?", choices=list(CLIPS), const=next(iter(CLIPS)), help=clip_help)
    group.add_argument("--compile", action="store_true", help="torch.compile the forward; T* is that of the uncompiled model")
    systems_help = f"{_systems_help()} (default: {','.join(default.systems)})"
    group.add_argument("--systems", type=_systems, default=default.systems, metavar="S,...", help=systems_help)
    add("EMULATED models", "rho", "megabytes")
    group = add("cluster, which a launcher's ranks have already", "workers")
    servers_help = "number of separate servers, or n: as many as workers; 0: a shard on every rank (default: 0)"
    group.add_argument("--servers", type=_servers, default=default.servers, metavar="K", help=servers_help)
    bandwidth_help = "rate of each link, such as 500mbit; or RATE,RATE,... for each host, workers first (default: loopback)"
    group.add_argument("--bandwidth", type=_rates, metavar="RATE", help=bandwidth_help)
    add_options(group, **{"flow-bandwidth": default.flow_bandwidth})
    add("settings of commsched", "transport", "lane", "flows", "partition", "credit")
    add("how long", "rounds", "steps", "settle")
    group = parser.add_argument_group("time limit and result")
    add_options(group, timeout=f"{default.timeout_seconds:g}", json=None)


def options_of(args: argparse.Namespace) -> TrainOptions:
    """The options of a command line."""
    given = {each.name: getattr(args, each.name) for each in fields(TrainOptions) if each.name != "timeout_seconds"}
    return TrainOptions(**given, timeout_seconds=parse_seconds(args.timeout))


@dataclass(frozen=True)
class Plan:
    """A measurement that this machine can make.

    Args:
        options: with the transport that ``auto`` stands for, and what a launcher decides.
        why_not_shaped: the reason why ranks limit their rate by themselves; None if links are shaped or need not be.
        specs: the systems, in the order of the options.
        own: the carrier of systems that name none.
        settings: of the ranks' own session.
        scaling: of an EMULATED model; None if it is REAL.
    """

    options: TrainOptions
    links: Links
    why_not_shaped: str | None
    specs: list[SystemSpec]
    own: Carrier
    settings: dict[str, str]
    scaling: Scaling | None


def plan_of(options: TrainOptions, world: World | None = None) -> Plan:
    """Check ``options``, and prepare what :func:`measure_rows` measures.

    Raises:
        ConfigError: an option is wrong, or this machine cannot do what it asks for; the message names it.
    """
    require_extra("bench", "torch", *(["sklearn"] if options.real else []))
    if world is not None:
        options = _options_here(options, world)
    else:
        require_no_launcher()
        require_links(options.flow_bandwidth, options.bandwidth)
    if options.settle < MIN_SETTLE_STEPS:
        raise ConfigError(
            f"settle={options.settle}: the first {MIN_SETTLE_STEPS} steps of a turn may still use "
            "the settings before it, or wait for their messages"
        )
    links = Links.of(options.workers, options.workers if options.servers == "n" else int(options.servers), options.bandwidth)
    specs = [parse(text) for text in options.systems]
    if options.clip and (unable := [spec.text for spec in specs if not systems.SYSTEMS[spec.base].clips]):
        raise ConfigError(f"systems: {', '.join(unable)} averages within step(), so no loop can clip there: leave it out")
    missing = why_not_shaped(links)
    if options.transport == "auto":
        options = replace(options, transport=_chosen_transport(options, links, missing is not None, world))
    own = carrier_of_job(specs, options.transport)
    if "nccl" in {own.transport, *(spec.carrier.transport for spec in specs if spec.carrier)}:
        raise ConfigError(
            "nccl: the benchmark's barriers are tensors in host memory, which it does not carry; ddp runs over NCCL, and "
            "--transport names another one for the systems on commsched, whatever COMMSCHED_TRANSPORT is"
        )
    if options.device != "cpu" and not options.real:
        raise ConfigError(f"device={options.device}: EMULATED layers need none; use --real")
    require_capped(links, missing, [spec.text for spec in specs if not spec.caps_itself(own.transport)])
    settings = _settings(options, own)
    check_settings(settings)
    return Plan(options, links, missing, specs, own, settings, _scaling(options, links))


def measure_rows(options: TrainOptions, world: World | None = None, show_progress: bool = False) -> list[dict[str, Any]]:
    """One row for each system, in the order of ``options.systems``.

    Args:
        world: the world of this process, if it is a rank that a launcher has started. Then all ranks call this function, links
            and machines are those that there are, and only rank 0 gets the rows. None means that this process starts the ranks.
        show_progress: whether to print what is being measured, and how long it will take.

    Raises:
        ConfigError: an option is wrong, or this machine cannot do what it asks for; the message names it.
        JobFailed: a process failed or took too long.
        CommschedError: a rank of ``world`` failed.
    """
    from ..harness.rows import Header, make_rows

    plan = plan_of(options, world)
    options, links, specs, own, settings = plan.options, plan.links, plan.specs, plan.own, plan.settings
    missing, scaling = plan.why_not_shaped, plan.scaling
    settle = settle_steps(options, specs, own)
    if show_progress and (world is None or world.rank == 0):
        where = "" if world is None else f" on {world.world_size} ranks of {world.launcher}"
        steps = options.rounds * (settle + options.steps)
        print(f"{', '.join(options.systems)} take turns{where}, {steps} steps each", flush=True)
    arguments = {
        "workload": {"kind": "real", "model": options.model, "device": options.device}
        if scaling is None
        else {"kind": "emulated", "profile": scaling.profile.to_record()},
        "systems": [spec.text for spec in specs],
        "carrier": asdict(own),
        "settle": settle,
        **{key: getattr(options, key) for key in ("rounds", "steps")},
        "bytes_scale": 1.0 if scaling is None else scaling.bytes_scale,
        "servers": links.servers,
        "nominal_rates": links.rates,
        "flow_rate": None if options.flow_bandwidth is None else parse_rate(options.flow_bandwidth, "flow-bandwidth"),
        "capped": missing is not None,
        "clip": options.clip,
        "compile": options.compile,
    }
    module = f"{__package__}.rank"
    if world is not None:
        from ..harness.launched import run_here

        arguments |= {"launched": True, "progress": "" if show_progress else None}
        outcome = run_here(world, settings, asdict(options), module, arguments, options.timeout_seconds)
        if outcome is None:
            return []
    else:
        mpi = any(spec.carrier is not None and spec.carrier.transport == "mpi" for spec in specs)
        job = Job(options.workers, links.servers, links.for_job(), settings, options.timeout_seconds, mpi=mpi, auto_sizes=True)
        job = replace(job, flow_bandwidth=options.flow_bandwidth)
        with relayed_lines() if show_progress else nullcontext() as progress:
            outcome = run_job(job, module, arguments | {"progress": progress})
        links.require_as_planned(outcome.link, missing)
    used = Settings.load(settings, {} if world is None else os.environ)
    header = Header(
        model=(f"{options.model} (reduced)" if scaling is None else scaling.real.model)
        + (" (compiled)" if options.compile else ""),
        workers=options.workers,
        servers=links.servers,
        bandwidth_bps=None if links.rates is None else 8 * min(links.rates),
        link=outcome.link,
        emulated=scaling is not None,
        stands_for=None if scaling is None or links.rates is None else scaling.stands_for(min(links.rates)),
        lane=used.lane,
        flows=used.flows,
        commit=commit(),
        clip=options.clip,
        device=options.device,
    )
    return make_rows(header, outcome.by_rank)


def _options_here(options: TrainOptions, world: World) -> TrainOptions:
    """The options of a rank that a launcher has started.

    Raises:
        ConfigError: an option is for jobs that the benchmark starts by itself.
    """
    default, started = TrainOptions(), f"{world.launcher} has started {world.world_size} ranks"
    if not options.real:
        raise ConfigError(f"{started}, whose links are real, so use --real; without a launcher the benchmark starts its own")
    if options.workers not in (default.workers, world.world_size):
        raise ConfigError(f"workers={options.workers}: {started}; leave the option out")
    if options.bandwidth is not None:
        raise ConfigError(f"bandwidth={options.bandwidth}: {started}, whose links are measured; leave the option out")
    if options.flow_bandwidth is not None:
        raise ConfigError(f"flow-bandwidth={options.flow_bandwidth}: {started}, whose links are real; leave the option out")
    if options.servers != default.servers:
        raise ConfigError(
            f"servers={options.servers}: {started}; start servers by commsched server, and set COMMSCHED_SERVERS on every rank"
        )
    servers = Settings.load({}, os.environ).servers
    return replace(options, workers=world.world_size, servers=str(len(servers)))


def settle_steps(options: TrainOptions, specs: Sequence[SystemSpec], own: Carrier) -> int:
    """The number of steps of a turn that do not count. ``own`` is the carrier of systems that name none."""
    carriers = [spec.carrier or own for spec in specs if SYSTEMS[spec.base].is_on_commsched]
    may_be_static = any(carrier.order != "agreed" and carrier.transport in users_of("order") for carrier in carriers)
    return options.settle + (FREEZE_STEPS if may_be_static else 0)


def _chosen_transport(options: TrainOptions, links: Links, capped: bool, world: World | None) -> str:
    """The transport of a job of these ranks with gradients in host memory, unless the environment of a launcher's ranks sets
    one. Ranks that mpiexec starts for the sake of another system count as ranks without a launcher.

    Args:
        capped: whether links cannot be shaped, so that all ranks are on this machine, and limit their rate by themselves.
    """
    if links.servers or options.lane is not None or options.flows != TrainOptions().flows:
        return "ps"
    settings = Settings.load({}, {} if world is None else os.environ)
    if world is None:
        together = capped or links.rates is None
        world = World(world_size=options.workers, local_world_size=options.workers if together else 1)
    return choose(settings, world, Capabilities(gloo=True, mpi4py=find_spec("mpi4py") is not None)).name


def _settings(options: TrainOptions, own: Carrier) -> dict[str, str]:
    """The settings of the ranks' own session. The other sessions use them too, except for their carrier."""
    found = {"transport": own.transport, "partition": options.partition, "credit": options.credit}
    plain = asdict(Carrier(own.transport))
    found |= {name: value for name, value in asdict(own).items() if value != plain[name]}
    if options.flows != TrainOptions().flows:
        found["flows"] = str(options.flows)
    return found if options.lane is None else {**found, "lane": options.lane}


def _scaling(options: TrainOptions, links: Links) -> Scaling | None:
    """The scaling of an EMULATED model; None if the model is REAL."""
    if options.real:
        if options.model not in real_model_names():
            raise ConfigError(f"model={options.model}: real models are {', '.join(real_model_names())}")
        if options.megabytes is not None:
            raise ConfigError("megabytes: the size of a REAL model is fixed; set bandwidth to change the time of communication")
        return None
    if links.rates is None:
        raise ConfigError("bandwidth: an EMULATED model is scaled to the link, so set its rate, such as 500mbit; or use --real")
    factor = bytes_factor(options.workers, links.servers)
    return scale(load_profile(options.model), options.megabytes, options.rho, min(links.rates), factor)


# --- argument types ---


def _systems_help() -> str:
    return (
        f"in turn: {', '.join(systems.names())}; those that run on commsched also as commsched:gloo, with +rsag for "
        "reduce-scatter and all-gather, +static or +agreed for an order of launches that does not choose itself"
    )


def _servers(text: str) -> str:
    return text if text == "n" else str(at_least(0)(text))


def _rates(text: str) -> str:
    return ",".join(setting(parse_rate)(rate) for rate in text.split(","))


def _systems(text: str) -> tuple[str, ...]:
    try:
        chosen = tuple(parse(each).text for each in text.split(","))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len(set(chosen)) < len(chosen):
        raise argparse.ArgumentTypeError(f"{text!r} names a system twice")
    return chosen
