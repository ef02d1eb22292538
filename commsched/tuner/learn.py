"""Rank 0 learns of a running training: it profiles a few steps, and keeps a model of step times in a process of its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ..core.errors import ClosedError
from ..core.interfaces import Observer
from ..core.manifest import Manifest
from ..core.scheduler import SchedulerConfig
from ..settings import Settings
from ..simulator.scenario import bytes_factor
from .initial_guesses import UNKNOWN_RATE, before_first_step, seeds
from .link import CORES_OF_A_RANK, PROCESSOR_SECONDS, known_rate, least_rate
from .meter import StepTimer
from .model_process import ModelProcess, RemoteModel
from .profiler import Measured, Profiler
from .space import MIN_TELLING_BYTES, MIN_TUNED_PARTITION_BYTES, max_ratio
from .trials import Stopped, TrialRunner

log = logging.getLogger("commsched")

#: Number of training steps in a profile.
PROFILE_STEPS = 5

#: Steps that begin during a profile. The last one ends the profile; observers are notified of it before the meter.
PROFILE_TAKES = PROFILE_STEPS + 1

AddObserver = Callable[[Observer], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Where training runs. ``world_size`` is the number of ranks, ``workers`` the number of ranks that use the network.
    ``transport`` is a name; ``ordered`` says whether ranks launch in one order. ``host`` is rank 0's address, ``hosts`` the
    number of hosts, ``servers`` the number of separate parameter servers, ``cores`` the number of processor cores that rank 0
    may use. ``flows`` is the number of connections between a worker and each shard or server. ``freezes`` says whether the
    order of launches may become static. Partitions are spread over ``shards``, separate servers or not; there is 1 if ranks
    average them by themselves."""

    world_size: int
    transport: str
    ordered: bool
    host: str
    hosts: int
    workers: int
    servers: int = 0
    cores: int = 1
    flows: int = 1
    freezes: bool = False
    shards: int = 1

    @property
    def largest_ratio(self) -> int:
        """The largest credit to try, in partitions."""
        return max_ratio(self.workers, self.servers, self.ordered) << (self.flows - 1).bit_length()

    @property
    def least_ratio(self) -> int:
        """The least credit to try, in partitions: several flows need one each. Simulated links are not capped, so a simulation
        would take less."""
        return 1 if self.flows == 1 else self.flows * (self.servers or max(1, self.workers - 1))


@dataclass(frozen=True, slots=True)
class TuningContext:
    """The parts that a search uses, all on rank 0. ``current`` returns the configuration agreed on last. ``say`` prints a line
    for the user. ``may_freeze`` says of a group whether its plugin allows a static order, ``is_static`` whether
    it has one now. ``first_sizes`` returns a configuration with the sizes that tensors begin with."""

    settings: Settings
    job: JobFacts
    meter: StepTimer
    trials: TrialRunner
    learner: Learner
    current: Callable[[], SchedulerConfig]
    say: Callable[[str], None]
    may_freeze: Callable[[int], bool] = lambda group: False
    is_static: Callable[[int], bool] = lambda group: False
    first_sizes: Callable[[Manifest, SchedulerConfig], SchedulerConfig] = lambda manifest, config: config


class FirstSizes:
    """Chooses the configuration for the first steps of tensors that are about to be registered, on rank 0.

    Args:
        current: returns the configuration agreed on last.
    """

    def __init__(self, job: JobFacts, settings: Settings, current: Callable[[], SchedulerConfig]) -> None:
        self._job = job
        self._settings = settings
        self._current = current
        self._largest_bytes = 0  # of the tensors that a configuration was chosen for

    def __call__(self, manifest: Manifest) -> SchedulerConfig | None:
        """``current`` with the sizes that the settings leave open. None if the tensors are too small to say anything about the
        job, or smaller than earlier ones. A search that tuning has begun keeps its configuration."""
        if not self._is_telling(manifest) or manifest.nbytes <= self._largest_bytes:
            return None
        if self._settings.tune is not None and self._largest_bytes > 0:
            return None
        self._largest_bytes = manifest.nbytes
        return self.of(manifest, self._current())

    def of(self, manifest: Manifest, config: SchedulerConfig) -> SchedulerConfig:
        """``config`` with the sizes that the settings leave open, for the tensors of ``manifest`` alone. If they are too small
        to say anything about the job, it stays as it is."""
        if not self._is_telling(manifest):
            return config
        job, settings, nbytes = self._job, self._settings, manifest.nbytes
        rates = [rate for rate in (settings.rate, known_rate(job.host)) if rate is not None]
        rate = min(rates, default=UNKNOWN_RATE)
        partition, lanes = before_first_step(
            nbytes,
            job.workers,
            servers=job.servers,
            ordered=job.ordered,
            rate=rate,
            processor_seconds=_processor_seconds(job, most_seconds_per_byte(job, settings)),
        )
        lanes *= job.flows
        if settings.partition is not None:
            partition = settings.partition
        elif settings.credit is not None:
            partition = min(partition, max(settings.credit // lanes, MIN_TUNED_PARTITION_BYTES))
        credit = lanes * partition if settings.credit is None else settings.credit
        return replace(config, partition_bytes=partition, credit_bytes=credit)

    def _is_telling(self, manifest: Manifest) -> bool:
        return manifest.nbytes >= MIN_TELLING_BYTES and self._job.workers > 1


def most_seconds_per_byte(job: JobFacts, settings: Settings) -> float:
    """The most that a byte of gradient takes on the network of ``job``; infinite if nothing is known of it."""
    alone = job.workers < 2  # ranks that sum in the memory of their host, which is no network
    rate = least_rate(job.host, job.workers) if settings.rate is None and not alone else None
    return math.inf if rate is None else bytes_factor(job.workers, job.servers) / rate


def _processor_seconds(job: JobFacts, most_seconds_per_byte: float) -> float:
    """The processor time of a partition that computation lacks, on the one network of which a byte's time is known: the memory
    of one machine. With more than two cores for each rank, cores that compute nothing do that work. The overhead that is
    measured of collectives there contains it."""
    is_short = job.cores <= CORES_OF_A_RANK * job.world_size
    return PROCESSOR_SECONDS if most_seconds_per_byte < math.inf and is_short and not job.ordered else 0.0


class NothingMeasured(Exception):
    """The steps of a profile were not complete, or sent nothing."""


class Learner:
    """Profiles steps and opens models. Call it from rank 0's tuner thread only, except :meth:`stop`.

    Args:
        watch: attaches an observer; the function that it returns detaches the observer.
        stopped: returns the reason why training ends; None while it goes on.
        most_seconds_per_byte: the most that a byte of gradient takes on this network; see :func:`most_seconds_per_byte`.
        counts: see :class:`Profiler`.
    """

    def __init__(
        self,
        job: JobFacts,
        meter: StepTimer,
        watch: AddObserver,
        stopped: Callable[[], str | None],
        most_seconds_per_byte: float = math.inf,
        counts: Callable[[int], bool] = lambda group: False,
    ) -> None:
        self._job = job
        self._meter = meter
        self._watch = watch
        self._stopped = stopped
        self._most_seconds_per_byte = most_seconds_per_byte
        self._counts = counts
        self._process: ModelProcess | None = None  # of the latest model

    def profile(self, group: int, manifest: Manifest) -> Measured | None:
        """Profile the next steps of ``group``, whose tensors are in ``manifest``. Returns None if training ends first, or
        another group is trained.

        Raises:
            NothingMeasured: no step was complete, or nothing was sent.
        """
        profiler = Profiler(group, PROFILE_STEPS, self._counts)
        forget = self._watch(profiler)
        try:
            goes_on = self._meter.wait_for_steps(group, PROFILE_TAKES)
        finally:
            profiler.stop()
            forget()
        if not goes_on:
            return None
        measured = profiler.result(manifest, ordered=self._job.ordered, most_seconds_per_byte=self._most_seconds_per_byte)
        if measured is None:
            raise NothingMeasured(f"{PROFILE_STEPS} steps were observed, none of them complete")
        return measured

    def guesses(self, measured: Measured, policy: str) -> list[SchedulerConfig]:
        """The first configurations to try; see ``initial_guesses.seeds``."""
        job = self._job
        return seeds(measured.profile, measured.link, job.workers, servers=job.servers, ordered=job.ordered, policy=policy)

    def open_model(self, measured: Measured, incumbent: SchedulerConfig, stack: ExitStack) -> RemoteModel:
        """A model of step times. Its link is the measured one if collectives have shown it; otherwise it is calibrated with the
        step time that was measured with ``incumbent``. ``stack`` ends its process.

        Raises:
            Stopped: training ends.
            RuntimeError, OSError: the process failed.
        """
        process = ModelProcess(
            measured.profile,
            measured.link,
            self._job.workers,
            servers=self._job.servers,
            ordered=self._job.ordered,
            anchor_bytes=incumbent.partition_bytes,
            processor_seconds=_processor_seconds(self._job, self._most_seconds_per_byte),
        )
        self._process = process
        self._require_open()
        model = stack.enter_context(process)
        self._require_open()
        return model if measured.busy is not None else model.calibrate([(incumbent, measured.step_seconds)])

    def stop(self) -> None:
        """Stop waiting for the model. Any thread may call it, after ``stopped`` returns a reason."""
        if self._process is not None:
            self._process.cancel()

    def _require_open(self) -> None:
        if (why := self._stopped()) is not None:
            raise Stopped(why)


def is_end(error: Exception) -> bool:
    """Whether ``error`` says that training ends, so that no model is needed any more."""
    return isinstance(error, (ClosedError, Stopped))
