"""One search in a running training: what may be chosen, who proposes, what is remembered, and where the result goes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import SchedulerConfig, Settings
from ..core.core import Core
from ..core.errors import ClosedError, ConfigError
from ..core.manifest import Manifest
from ..core.ports import Observer
from ..version import __version__
from .journal import Journal
from .link import describe_link
from .meter import Meter
from .searchers import make_searcher, uses_model
from .space import CHOICES, MAX_PARTITION_BYTES, MAX_RATIO, Space
from .trial import StepModel, Stopped
from .trials import Trials
from .tuned import Key, describe_transport, write_tuned
from .tuning import Tuning
from .verdict import Verdict

if TYPE_CHECKING:
    from .model_process import ModelProcess
    from .profiler import Measured

log = logging.getLogger("commsched")


#: That a profile is made of.
PROFILE_STEPS = 5

Watch = Callable[[Observer], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Job:
    """Where training runs: the transport by name, whether it is one of collectives, rank 0's address, how many hosts there are
    and how many ranks, and how many of these use the network."""

    world_size: int
    transport: str
    collective: bool
    host: str
    hosts: int
    workers: int


class Search:
    """Searches as ``settings`` ask for; rank 0's tuner thread only.

    Args:
        current: the configuration in use.
        watch: has an observer told of what happens, until what it returns is called.
        say: takes lines for the user.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        meter: Meter,
        trials: Trials,
        current: Callable[[], SchedulerConfig],
        watch: Watch,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._job = job
        self._meter = meter
        self._trials = trials
        self._current = current
        self._watch = watch
        self._say = say
        self._model: ModelProcess | None = None  # the last one
        self._journal_keys: dict[str, dict[str, Any]] = {}  # by model

    def run(self, group: int, manifest: Manifest, *, again: bool = False) -> Verdict | None:
        """Tune for ``manifest``, the tensors of ``group``, and write down what came of it. ``again``: what the journal holds
        does not hold any more. None: there is nothing to choose.

        Raises:
            ConfigError: the journal is of another search, or one of the files cannot be written.
        """
        settings, incumbent = self._settings, self._current()
        space = Space(incumbent, sum(manifest.buffer_bytes.values()), fixed_by(settings), settings.tune_policies)
        if space.dimensions == 0:
            self._say("tuning: nothing is left to choose; partition, credit and policy are given, or the model is too small")
            return None
        key = Key(
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
            verdict = Tuning(
                incumbent,
                make_searcher(settings.tune_by, space, seeds=seeds, model=model),
                partial(self._trials.measure, group=group),
                settings.tune,
                apply=self._trials.apply,
                say=self._say,
                also=[settings.scheduler] if again else (),  # the incumbent is what a search before this one has found
                journal=journal,
                settle_steps=self._trials.settle_steps,
            ).run()
            if settings.tune_out is not None and verdict.finished:
                groups = self._meter.manifests()
                write_tuned(settings.tune_out, verdict, key, manifest, groups=groups, version=__version__)
        return verdict

    def stop(self) -> None:
        """Wait for no model any more. Any thread; after ``trials.stop``."""
        if self._model is not None:
            self._model.cancel()

    def _require_open(self) -> None:
        if self._trials.stopped is not None:
            raise Stopped(self._trials.stopped)

    def _learn(
        self, group: int, manifest: Manifest, incumbent: SchedulerConfig, stack: ExitStack
    ) -> tuple[list[SchedulerConfig], StepModel | None]:
        """Configurations worth trying first, and a model's step times, from a profile of the next steps. The search does
        without them if that cannot be had. ``stack`` ends the model."""
        from .model_process import ModelProcess
        from .seeds import seeds

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
                collective=job.collective,
                policy=incumbent.policy,
            )
            process = ModelProcess(
                measured.profile,
                measured.link,
                job.workers,
                servers=servers,
                collective=job.collective,
                anchor_bytes=incumbent.partition_bytes,
            )
            self._model = process
            self._require_open()
            model = stack.enter_context(process)
            self._require_open()
            return first, model.calibrate([(incumbent, measured.step_seconds)])
        except (ClosedError, Stopped):
            raise
        except Exception as error:  # a model is a help, and no more
            log.warning("tuning does without a model: %s: %s", type(error).__name__, error)
            return [], None

    def _profile(self, group: int, manifest: Manifest) -> Measured | None:
        from .profiler import Profiler

        profiler = Profiler(group, PROFILE_STEPS)
        forget = self._watch(profiler)
        try:
            # Its first step is one that begins from now on; the last has ended when the next begins, which it hears last.
            goes_on = self._meter.wait_for_steps(group, PROFILE_STEPS + 2)
        finally:
            profiler.stop()
            forget()
        return profiler.result(manifest, collective=self._job.collective) if goes_on else None

    def _open_journal(self, key: Key, space: Space) -> Any:
        """What was asked for belongs to the key too: as it was at first, since a search again begins elsewhere."""
        if self._settings.tune_out is None:
            return nullcontext()
        is_first = not self._journal_keys  # what it holds of other models is of this job's other stages only after that
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
    """What a user has set is left as it is; a policy only if he names none to choose from."""
    return (settings.given & CHOICES) - ({"policy"} if settings.tune_policies else set())


def require_possible(settings: Settings, core: Core) -> None:
    """Check, before training begins, all that can be known of a search by then.

    Raises:
        ConfigError: there is no such searcher, what it needs is not installed, it cannot search for what is left to choose, or
            the result cannot be written there.
        UnsupportedError: a policy to choose from is one that the transport cannot follow.
    """
    for policy in settings.tune_policies:
        core.require_supported(replace(core.config, policy=policy))
    large = MAX_RATIO * MAX_PARTITION_BYTES  # a model that leaves free what is not given
    make_searcher(settings.tune_by, Space(core.config, large, fixed_by(settings), settings.tune_policies))
    if settings.tune_out is None:
        return
    if not Path(settings.tune_out).absolute().parent.is_dir():
        raise ConfigError(f"tune_out={settings.tune_out!r}: there is no such directory")
    if Path(settings.tune_out) == journal_path(settings.tune_out):
        raise ConfigError(f"tune_out={settings.tune_out!r} is the name of its journal; write it like tuned.toml")
