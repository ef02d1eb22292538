"""A session speaks to users through the logger ``commsched``, as the script has set up logging, or else in a few one-time lines
and warnings on stderr. The lines that a job begins with are made here, too."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from ..core.manifest import Manifest
from ..core.scheduler import SchedulerConfig
from ..core.standard_streams import say_error
from ..core.world import World
from ..settings import Settings
from ..tuner.result import size
from ..tuner.space import MIN_TELLING_BYTES

log = logging.getLogger("commsched")


def say(line: str) -> None:
    """Show the user a line that is visible by default. If the script has set up logging in any way, the line goes through
    logging, whose set-up then decides; otherwise it goes to stderr."""
    if _is_set_up() or log.level != logging.NOTSET or log.manager.disable >= logging.INFO:
        log.info("%s", line)
    else:
        say_error(f"commsched: {line}")


def set_level(level: str) -> None:
    """Apply ``COMMSCHED_LOG``: records of ``level`` (``warning``, ``info``, ``debug``) and above are shown, and none below.
    They go to stderr if the script has not set up logging."""
    log.setLevel(level.upper())
    say_whose_warnings()


def say_whose_warnings() -> None:
    """Let warnings begin with "commsched: " where the script has not set up logging. Idempotent."""
    if not any(isinstance(handler, _LastResort) for handler in log.handlers):
        log.addHandler(_LastResort())


def _is_set_up() -> bool:
    return any(not isinstance(handler, _LastResort) for handler in (*log.handlers, *logging.getLogger().handlers))


class _LastResort(logging.StreamHandler[TextIO]):
    """Like ``logging.lastResort``, for every level. Silent once the script has set up logging, whether earlier or later."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter("commsched: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr  # the current one: it may have been replaced

    def filter(self, record: logging.LogRecord) -> bool:
        return not _is_set_up()


#: Advice to users whose ranks opened no session.
NOTHING_MADE = (
    "Does the script make the ScheduledOptimizer, or the object that your engine's guide names? COMMSCHED_DISABLE=1 turns this "
    "line off."
)

#: Launchers and batch systems set these variables to the number of processes that they started or will start.
_SIZES = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_WORLD_SIZE", "SLURM_NTASKS")


def alone_line(environ: Mapping[str, str]) -> str:
    """The line printed by a process that found no launcher's variables saying that it is one of several."""
    line = "1 process, so nothing is averaged; start more with commsched run -n N -- COMMAND, torchrun, mpirun or srun"
    for name in _SIZES:
        size = environ.get(name, "1")
        if size.isdecimal() and int(size) > 1:
            return f"{line} ({name}={size}, but no launcher that commsched knows gave this process a rank)"
    return line


def no_rank_line(world: World, environ: Mapping[str, str]) -> str | None:
    """A warning to scripts that split their data by torchrun's variables. None if the environment or the launcher sets them."""
    if not world.launcher.startswith(("mpi", "srun")) or "RANK" in environ or "WORLD_SIZE" in environ:
        return None
    return (
        f"{world.launcher} sets no RANK and WORLD_SIZE: a script that shares out its data by them reads the same data on every "
        "rank; let it use the rank and world_size of commsched.init()"
    )


def first_line(
    settings: Settings,
    transport: str,
    ordered: bool,
    ranks: int,
    hosts: int,
    config: SchedulerConfig,
    manifest: Manifest,
    one_per_host: bool = False,
    may_become_static: bool = False,
) -> str:
    """The line that describes the job, for the tensors of ``manifest``, cut and ordered by ``config``. ``ordered``: all ranks
    of ``transport`` launch in one order, and that order ``may_become_static``. ``one_per_host``: the ranks of a host sum
    before one of them uses the network."""
    way = f"{transport} over {settings.lane}" if transport == "ps" else transport
    if transport == "ps" and settings.flows > 1:
        way += f" on {settings.flows} flows"
    if settings.servers:
        way += f" with {_count(len(settings.servers), 'server')}"
    choosing = manifest.nbytes >= MIN_TELLING_BYTES  # smaller tensors leave nothing to choose
    parts = [
        f"{_count(ranks, 'rank')} on {_count(hosts, 'host')}",
        way,
        f"{_count(len(manifest.tensors), 'tensor')} of {size(manifest.nbytes)} per step",
        f"partition {size(config.partition_bytes)}{' at first' if choosing and settings.partition is None else ''}",
        f"credit {size(config.credit_bytes)}{' at first' if choosing and settings.credit is None else ''}",
        config.policy,
    ]
    if config.collective != "all_reduce":
        parts.append(config.collective)
    if ordered:
        at_first = may_become_static and choosing and settings.order == "auto" and settings.tune is None
        parts.append(f"{config.order} order{' at first' if at_first else ''}")
    if settings.wire != "none":
        parts.append(f"{settings.wire} on the wire")
    if settings.security != "none":
        parts.append("encrypted")
    if one_per_host:
        parts.append("each host sums first (hierarchy)")
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class FirstLine:
    """Prints the first lines of a job once, when the first gradients are registered: the tensors are not known earlier."""

    def __init__(self, say: Callable[[str], None], describe: Callable[[Manifest], list[str]]) -> None:
        self._say = say
        self._describe = describe
        self._said = False

    def on_register(self, group: int, manifest: Manifest) -> None:
        """The callback for ``Session.on_register``."""
        if not self._said:
            self._said = True
            for line in self._describe(manifest):
                self._say(line)
