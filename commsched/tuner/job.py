"""One search in a running training: sets up its space, searcher, model and journal, and writes its result."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from ..core.core import Core
from ..core.errors import ConfigError, error_text
from ..core.manifest import Manifest
from ..core.scheduler import SchedulerConfig
from ..settings import Settings
from ..version import __version__
from .auto import best_sizes, partition_count
from .journal import Journal
from .learn import TuningContext, is_end
from .link import describe_link
from .result import JobKey, Verdict, describe_transport, write_tuned
from .search_run import SearchRun
from .searchers import StepModel, make_searcher, uses_model
from .space import MAX_RATIO, MAX_TUNED_PARTITION_BYTES, Space, fixed_by

log = logging.getLogger("commsched")


class TuningJob:
    """Runs searches according to the settings. Call it from rank 0's tuner thread only."""

    def __init__(self, context: TuningContext) -> None:
        self._context = context
        self._journal_keys: dict[str, dict[str, Any]] = {}  # by model

    def run(self, group: int, manifest: Manifest, again: bool = False) -> Verdict | None:
        """Tune for ``manifest``, the tensors of ``group``, and write the result. Returns None if there is nothing to choose.

        Args:
            again: discard the trials in the journal, because they are no longer valid.

        Raises:
            ConfigError: the journal is of another search, or one of the files cannot be written.
        """
        settings, incumbent = self._context.settings, self._context.current()
        job = self._context.job
        ratios = job.largest_ratio, job.least_ratio
        space = Space(incumbent, max(1, manifest.nbytes), fixed_by(settings), settings.tune_policies, *ratios)
        if space.dimensions == 0:
            self._context.say(
                "tuning: nothing is left to choose; partition, credit and policy are given, or the model is too small"
            )
            return None
        key = JobKey(
            manifest.model_fingerprint,
            self._context.job.world_size,
            self._context.job.hosts,
            describe_transport(self._context.job.transport, settings),
            describe_link(self._context.job.host, settings.rate),
        )
        assert settings.tune is not None
        with self._open_journal(key, space) as journal, ExitStack() as stack:
            if again and journal is not None:
                journal.start_over()
            seeds, model = list[SchedulerConfig](), None
            if uses_model(settings.tune_by) and self._context.job.workers > 1 and (journal is None or journal.result is None):
                seeds, model = self._learn(group, manifest, incumbent, space, stack)
            first = self._context.first_sizes(manifest, settings.scheduler)
            verdict = SearchRun(
                incumbent,
                make_searcher(settings.tune_by, space, seeds=seeds, model=model),
                partial(self._context.trials.measure, group=group),
                settings.tune,
                apply=self._context.trials.apply,
                say=self._context.say,
                says_verdict=settings.tune_end is None,
                also=[first] if again else (),  # an earlier search found the incumbent
                journal=journal,
                settle_steps=self._context.trials.settle_steps(space.incumbent),
            ).run()
            if settings.tune_out is not None and verdict.finished:
                groups = self._context.meter.manifests()
                write_tuned(settings.tune_out, verdict, key, manifest, groups=groups, version=__version__)
        return verdict

    def _learn(
        self, group: int, manifest: Manifest, incumbent: SchedulerConfig, space: Space, stack: ExitStack
    ) -> tuple[list[SchedulerConfig], StepModel | None]:
        """Profile the next steps; return the first configurations to try and a model of step times. If that fails, the search
        runs without them. ``stack`` ends the model's process."""
        try:
            measured = self._context.learner.profile(group, manifest)
            if measured is None:
                return [], None
            first = self._context.learner.guesses(measured, incumbent.policy)
            model = self._context.learner.open_model(measured, incumbent, stack)
            job = self._context.job
            count = partition_count(manifest, job.shards, incumbent.fusion_bytes)
            # The sizes of a job that is not tuned.
            best = best_sizes(model.predict, space, [incumbent, *first], job.ordered, count=count)
            return list(dict.fromkeys([best, *first])), model
        except Exception as error:
            if is_end(error):
                raise
            log.warning("tuning goes on without a model: %s", error_text(error))
            return [], None

    def _open_journal(self, key: JobKey, space: Space) -> Any:
        """The journal's key also holds the settings and the first search's incumbent. A repeated search keeps that key,
        because it starts from another incumbent."""
        if self._context.settings.tune_out is None:
            return nullcontext()
        is_first = not self._journal_keys  # only later may the file hold other models: this job's earlier stages
        journal_key = self._journal_keys.setdefault(
            key.model,
            {
                **asdict(key),
                "from": space.incumbent.to_record(),
                "policies": list(space.choices),
                "given": sorted(space.fixed),
                "by": self._context.settings.tune_by,
            },
        )
        return closing(Journal(journal_path(self._context.settings.tune_out), journal_key, beside_others=not is_first))


def journal_path(tune_out: str) -> Path:
    """The journal beside a result file: ``tuned.jsonl`` for ``tuned.toml``."""
    return Path(tune_out).with_suffix(".jsonl")


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
    require_writable(Path(settings.tune_out), f"tune_out={settings.tune_out!r}")


def require_writable(result: Path, label: str) -> None:
    """Require that ``result`` and its journal can be written. Neither is created or changed. Raises ConfigError, which begins
    with ``label``."""
    journal = journal_path(str(result))
    try:
        for path in (result, journal):
            if path.is_dir():
                raise ConfigError(f"{label}: {path} is a directory")
        # Not opened: to close it would give up the lock that another session of this process may have on it.
        if journal.exists() and not os.access(journal, os.W_OK):
            raise ConfigError(f"{label}: {journal} cannot be written")
        with NamedTemporaryFile(dir=result.parent, prefix=f"{result.name}."):
            pass
    except OSError as error:
        raise ConfigError(f"{label} cannot be written: {error_text(error)}") from error
