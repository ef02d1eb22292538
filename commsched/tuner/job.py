"""One search in a running training: sets up its space, searcher, model and journal, and writes its result."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import SchedulerConfig
from ..core.core import Core
from ..core.errors import ClosedError, ConfigError
from ..core.interfaces import Observer
from ..core.manifest import Manifest
from ..settings import Settings
from ..version import __version__
from .journal import Journal
from .link import describe_link
from .meter import StepTimer
from .result import JobKey, Verdict, describe_transport, write_tuned
from .search_run import SearchRun
from .searchers import StepModel, make_searcher, uses_model
from .space import CHOICES, MAX_RATIO, MAX_TUNED_PARTITION_BYTES, Space
from .trials import Stopped, TrialRunner

if TYPE_CHECKING:
    from .model_process import ModelProcess
    from .profiler import Measured

log = logging.getLogger("commsched")


#: Number of training steps in a profile.
PROFILE_STEPS = 5

AddObserver = Callable[[Observer], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Where training runs. ``world_size`` is the number of ranks, ``workers`` the number of ranks that use the network.
    ``transport`` is a name; ``ordered`` says whether ranks launch in one order. ``host`` is rank 0's address, ``hosts`` the
    number of hosts."""

    world_size: int
    transport: str
    ordered: bool
    host: str
    hosts: int
    workers: int


class TuningJob:
    """Runs searches according to ``settings``. Call it from rank 0's tuner thread only.

    Args:
        current: returns the configuration in use.
        watch: attaches an observer; the function that it returns detaches the observer.
        say: prints a line for the user.
    """

    def __init__(
        self,
        settings: Settings,
        job: JobFacts,
        meter: StepTimer,
        trials: TrialRunner,
        current: Callable[[], SchedulerConfig],
        watch: AddObserver,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._job = job
        self._meter = meter
        self._trials = trials
        self._current = current
        self._watch = watch
        self._say = say
        self._model: ModelProcess | None = None  # of the latest search
        self._journal_keys: dict[str, dict[str, Any]] = {}  # by model

    def run(self, group: int, manifest: Manifest, *, again: bool = False) -> Verdict | None:
        """Tune for ``manifest``, the tensors of ``group``, and write the result. Returns None if there is nothing to choose.

        Args:
            again: discard the trials in the journal, because they are no longer valid.

        Raises:
            ConfigError: the journal is of another search, or one of the files cannot be written.
        """
        settings, incumbent = self._settings, self._current()
        space = Space(incumbent, sum(manifest.buffer_bytes.values()), fixed_by(settings), settings.tune_policies)
        if space.dimensions == 0:
            self._say("tuning: nothing is left to choose; partition, credit and policy are given, or the model is too small")
            return None
        key = JobKey(
            manifest.model_fingerprint,
            self._job.world_size,
            self._job.hosts,
            describe_transport(self._job.transport, settings),
            describe_link(self._job.host, settings.rate),
        )
        assert settings.tune is not None
        with self._open_journal(key, space) as journal, ExitStack() as stack:
            if again and journal is not None:
                journal.start_over()
            seeds, model = list[SchedulerConfig](), None
            if uses_model(settings.tune_by) and self._job.workers > 1 and (journal is None or journal.result is None):
                seeds, model = self._learn(group, manifest, incumbent, stack)
            verdict = SearchRun(
                incumbent,
                make_searcher(settings.tune_by, space, seeds=seeds, model=model),
                partial(self._trials.measure, group=group),
                settings.tune,
                apply=self._trials.apply,
                say=self._say,
                also=[settings.scheduler] if again else (),  # an earlier search found the incumbent
                journal=journal,
                settle_steps=self._trials.settle_steps,
            ).run()
            if settings.tune_out is not None and verdict.finished:
                groups = self._meter.manifests()
                write_tuned(settings.tune_out, verdict, key, manifest, groups=groups, version=__version__)
        return verdict

    def stop(self) -> None:
        """Stop waiting for the model. Any thread may call it, after ``trials.stop``."""
        if self._model is not None:
            self._model.cancel()

    def _require_open(self) -> None:
        if self._trials.stopped is not None:
            raise Stopped(self._trials.stopped)

    def _learn(
        self, group: int, manifest: Manifest, incumbent: SchedulerConfig, stack: ExitStack
    ) -> tuple[list[SchedulerConfig], StepModel | None]:
        """Profile the next steps; return the first configurations to try and a model of step times. If that fails, the search
        runs without them. ``stack`` ends the model's process."""
        from .initial_guesses import seeds
        from .model_process import ModelProcess

        job, servers = self._job, len(self._settings.servers)
        try:
            measured = self._profile(group, manifest)
            if measured is None:
                return [], None
            first = seeds(
                measured.profile,
                measured.link,
                job.workers,
                servers=servers,
                ordered=job.ordered,
                policy=incumbent.policy,
            )
            process = ModelProcess(
                measured.profile,
                measured.link,
                job.workers,
                servers=servers,
                ordered=job.ordered,
                anchor_bytes=incumbent.partition_bytes,
            )
            self._model = process
            self._require_open()
            model = stack.enter_context(process)
            self._require_open()
            return first, model.calibrate([(incumbent, measured.step_seconds)])
        except (ClosedError, Stopped):
            raise
        except Exception as error:  # the search works without a model
            log.warning("tuning goes on without a model: %s: %s", type(error).__name__, error)
            return [], None

    def _profile(self, group: int, manifest: Manifest) -> Measured | None:
        from .profiler import Profiler

        profiler = Profiler(group, PROFILE_STEPS)
        forget = self._watch(profiler)
        try:
            # The profiler's first step begins after this point. Its last step ends when the next one begins, and the profiler
            # is the last observer to be notified of that.
            goes_on = self._meter.wait_for_steps(group, PROFILE_STEPS + 2)
        finally:
            profiler.stop()
            forget()
        return profiler.result(manifest, ordered=self._job.ordered) if goes_on else None

    def _open_journal(self, key: JobKey, space: Space) -> Any:
        """The journal's key also holds the settings and the first search's incumbent. A repeated search keeps that key,
        because it starts from another incumbent."""
        if self._settings.tune_out is None:
            return nullcontext()
        is_first = not self._journal_keys  # only later may the file hold other models: this job's earlier stages
        journal_key = self._journal_keys.setdefault(
            key.model,
            {
                **key.to_record(),
                "from": space.incumbent.to_record(),
                "policies": list(space.choices),
                "given": sorted(space.fixed),
                "by": self._settings.tune_by,
            },
        )
        return closing(Journal(journal_path(self._settings.tune_out), journal_key, beside_others=not is_first))


def journal_path(tune_out: str) -> Path:
    """The journal beside a result file: ``tuned.jsonl`` for ``tuned.toml``."""
    return Path(tune_out).with_suffix(".jsonl")


def fixed_by(settings: Settings) -> frozenset[str]:
    """The choices that the user has set, which tuning keeps. A policy that is set counts only if no policies to choose from are
    named."""
    return (settings.given & CHOICES) - ({"policy"} if settings.tune_policies else set())


def require_possible(settings: Settings, core: Core) -> None:
    """Check everything about a search that can be checked before training begins.

    Raises:
        ConfigError: the searcher does not exist, one of its packages is not installed, it cannot search the choices that are
            left, or the result cannot be written to ``tune_out``.
    """
    large = MAX_RATIO * MAX_TUNED_PARTITION_BYTES  # a model so large that every choice that is not given is free
    make_searcher(settings.tune_by, Space(core.config, large, fixed_by(settings), settings.tune_policies))
    if settings.tune_out is None:
        return
    if not Path(settings.tune_out).absolute().parent.is_dir():
        raise ConfigError(f"tune_out={settings.tune_out!r}: there is no such directory")
    if Path(settings.tune_out) == journal_path(settings.tune_out):
        raise ConfigError(f"tune_out={settings.tune_out!r} is the name of its journal; write it like tuned.toml")
