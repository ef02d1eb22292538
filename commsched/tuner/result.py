"""The result of tuning, for people and files: the verdict of a search, and the tuned file (tuned.toml), which holds the kept
settings and a description of the job that they are for.

``COMMSCHED_CONFIG`` names the file, and ``Settings`` reads it. Settings that are good for one model on one network may be slow
for another, without any sign of it. Therefore every other job refuses the file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..core.errors import ConfigError
from ..core.manifest import Manifest
from ..core.scheduler import SchedulerConfig
from ..settings import Settings

#: kept: the winner was confirmed. no gain: no tried configuration was better, so there was nothing to confirm. not confirmed:
#: the comparison did not show the gain beyond doubt. failed: too many trials failed in a row, or all except the incumbent's
#: failed. unfinished: training, or the training of these tensors, ended first.
Reason = Literal["kept", "no gain", "not confirmed", "failed", "unfinished"]


def size(nbytes: int) -> str:
    """Format a size in decimal units: ``4.0 MB``, ``64 KB``, ``160 bytes``."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1_000_000 else f"{nbytes / 1e3:.0f} KB"


def milliseconds(seconds: float, like: float | None = None) -> str:
    """Format a time as milliseconds without a unit. The number of decimals gives about three digits to ``like``, or by default
    to the number itself."""
    like = like or seconds
    return f"{seconds * 1e3:.{0 if like >= 1 else 1 if like >= 0.01 else 2}f}"


def describe_config(config: SchedulerConfig, beside: SchedulerConfig | None = None) -> str:
    """Describe ``config`` for people, in decimal units: ``partition 2.0 MB, credit 8.0 MB, static order``. An agreed order is
    not mentioned. The policy is added if it differs from the policy of ``beside``."""
    text = f"partition {size(config.partition_bytes)}, credit {size(config.credit_bytes)}"
    if config.order != SchedulerConfig().order:
        text += f", {config.order} order"
    return text if beside is None or beside.policy == config.policy else f"{text}, policy {config.policy}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of tuning and the configuration that it keeps.

    ``winner`` is the best configuration that was tried. ``gain`` is the part of the step time that it saves against
    ``incumbent`` (0.18 is 18 %; negative if it is slower). ``low`` and ``high`` are the ends of the 95 % interval, from
    ``pairs`` pairs of windows (the pairs of ``stats.PairedComparison``). These four are 0 if there was no comparison. The two
    ``..._seconds`` are the step times in these pairs, or otherwise in the search; 0 if not measured. ``trials`` is the number
    of trials of the search. ``others`` is the number of its windows of other configurations than the incumbent. ``steps`` and
    ``seconds`` are the total cost of tuning, including an earlier job that was killed.
    """

    reason: Reason
    kept: SchedulerConfig
    incumbent: SchedulerConfig
    winner: SchedulerConfig
    trials: int
    others: int
    steps: int
    seconds: float
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    incumbent_seconds: float = 0.0
    winner_seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the search is complete, so that it need not be repeated."""
        return self.reason in ("kept", "no gain", "not confirmed") and self.others > 0

    def sentence(self) -> str:
        """The verdict as one sentence for the log."""
        cost = f"tuning: {self.trials} trials, {self.seconds:.0f} s"
        stays = f"{describe_config(self.incumbent)} kept"
        if self.reason == "unfinished":
            return f"{cost}: not finished; {stays}"
        if self.reason == "failed":
            nothing_else = self.incumbent_seconds > 0 and self.others == 0
            why = "no other configuration could be measured" if nothing_else else "too many trials in a row failed"
            return f"{cost}: {why}; {stays}"
        if self.winner == self.incumbent:
            why = "nothing tried was faster" if self.others else "nothing was tried"
            return f"{cost}: no gain, {why}; {stays}"
        winner = describe_config(self.winner, self.incumbent)
        took = f"{milliseconds(self.winner_seconds)} ms instead of {milliseconds(self.incumbent_seconds)} ms"
        interval = f"95 % between {_change(self.low)} and {_change(self.high)}, {self.pairs} pairs"
        compared = f"{winner}: {took} ({_change(self.gain)}, {interval})"
        if self.reason == "kept":
            return f"{cost}: {compared}: kept"
        return f"{cost}: no gain confirmed; {stays}. The best candidate was {compared}"

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Verdict:
        """The inverse of ``asdict``; other keys are ignored. Raises KeyError or TypeError if ``record`` is not a
        verdict."""
        values = {f.name: record[f.name] for f in fields(cls)}
        return cls(**{**values, **{name: SchedulerConfig(**values[name]) for name in ("kept", "incumbent", "winner")}})


def _change(gain: float) -> str:
    return f"{-100 * gain:+.1f} %"


log = logging.getLogger("commsched")


@dataclass(frozen=True, slots=True)
class JobKey:
    """The job that a result of tuning is for. ``model`` identifies the tensors of the tuned group
    (``Manifest.model_fingerprint``). ``hosts`` is the number of machines. ``transport`` is from ``describe_transport``,
    ``link`` from ``link.describe_link`` on rank 0."""

    model: str
    world_size: int
    hosts: int
    transport: str
    link: str


def describe_transport(name: str, settings: Settings) -> str:
    """The transport ``name`` with the settings on which its best configuration depends: ``ps over tcp, 2 servers,
    wire=bfloat16``."""
    parts = [f"{name} over {settings.lane}" if name == "ps" else name]
    if settings.servers:
        parts.append(f"{len(settings.servers)} servers")
    # A job that is tuned keeps the order that it begins with, so ``auto`` and ``agreed`` are the same.
    ours, usual = (replace(each, order=each.scheduler.order) for each in (settings, Settings()))
    for setting in ("flows", "security", "order", "collective", "wire", "hierarchy"):
        if getattr(ours, setting) != getattr(usual, setting):
            parts.append(f"{setting}={getattr(ours, setting)}")
    return ", ".join(parts)


def write_tuned(
    path: str | Path,
    verdict: Verdict,
    key: JobKey,
    manifest: Manifest,
    *,
    groups: Iterable[Manifest] = (),
    version: str,
) -> None:
    """Replace the file ``path`` atomically by the configuration that is kept. This includes a configuration that was set
    before, so that the next start need not tune again.

    Args:
        verdict: a finished verdict.
        manifest: the tensors of the group that ``key.model`` identifies.
        groups: the manifests of all other groups that plugins have registered.
        version: version of commsched, for human readers only.

    Raises:
        ValueError: the verdict is not finished.
        ConfigError: the file cannot be written.
    """
    if not verdict.finished:
        raise ValueError(f"a verdict {verdict.reason!r} is no result")
    kept = verdict.kept
    settings = {"partition": kept.partition_bytes, "credit": kept.credit_bytes, "policy": kept.policy}
    if kept.fusion_bytes is not None:
        settings["fusion"] = kept.fusion_bytes
    table = {
        **asdict(key),
        "groups": sorted({group.model_fingerprint for group in (manifest, *groups)}),
        "tensors": len(manifest.tensors),
        "bytes": manifest.nbytes,
        "version": version,
        "reason": verdict.reason,
        "step_seconds_before": verdict.incumbent_seconds,
        "step_seconds_after": verdict.winner_seconds if verdict.reason == "kept" else verdict.incumbent_seconds,
        "gain": verdict.gain if verdict.reason == "kept" else 0.0,
        "low": verdict.low if verdict.reason == "kept" else 0.0,
        "high": verdict.high if verdict.reason == "kept" else 0.0,
    }
    lines = [
        "# Settings that tuning found. To use them: COMMSCHED_CONFIG=<this file>. Other jobs than that of [tuned] refuse it.",
        f"# {verdict.sentence()}",
        *(f"{name} = {_toml(value)}" for name, value in settings.items()),
        "",
        "[tuned]",
        *(f"{name} = {_toml(value)}" for name, value in table.items()),
    ]
    _replace(Path(path), "\n".join(lines) + "\n")


def why_not(made_for: JobKey, job: JobKey) -> str | None:
    """The reason, in words, why a result made for one job does not fit another; None if it fits."""
    for name, (describe, remedy) in _FIT.items():
        theirs, ours = getattr(made_for, name), getattr(job, name)
        if theirs != ours:
            return f"{describe.format(theirs)}, but this job {remedy.format(ours)}"
    return None


_FIT = {
    "world_size": ("{} ranks", "has {}"),
    "hosts": ("{} hosts", "has {}"),
    "transport": ("transport {}", "uses {}"),
    "link": ("the link '{}'", "has '{}'"),
    "model": ("another model", "trains one with other tensors"),
}


def check_tuned(tuned: Mapping[str, Any], world_size: int, hosts: int, transport: str, link: str) -> None:
    """Check the table ``tuned`` of a settings file against the properties of a job that are known when its session opens. Call
    it on rank 0, because other machines may name their links differently.

    Raises:
        ConfigError: names the difference, or the entry that is missing in the table.
    """
    made_for = _key(tuned)
    _refuse_if(why_not(made_for, JobKey(made_for.model, world_size, hosts, transport, link)))


class ModelCheck:
    """Checks the table ``tuned`` against the groups of tensors that plugins register, in their order, on every rank.

    If the first group of a job is not in the table, the job is another one. Once a job has registered a group of the table, it
    is the right job. Further groups that it trains later, or that first appeared after tuning, are no reason to end it.

    Args:
        warn: log one warning when such a further group is registered.

    Raises:
        ConfigError: an entry is missing in the table.
    """

    def __init__(self, tuned: Mapping[str, Any], *, warn: bool) -> None:
        self._tuned = tuned
        self._made_for = _key(tuned)
        groups = tuned.get("groups")
        if not isinstance(groups, list):
            raise ConfigError("the tuned file is not complete: there is no list groups in its table [tuned]; tune again")
        self._groups = groups
        self._fits = False
        self._warn = warn

    def on_register(self, _: int, manifest: Manifest) -> None:
        """
        Raises:
            ConfigError: the group is not in the file, and this job has not registered any group of the file yet.
        """
        if manifest.model_fingerprint in self._groups:
            self._fits = True
            return
        has = f"{len(manifest.tensors)} tensors, {manifest.nbytes} bytes"
        if not self._fits:
            reason = why_not(self._made_for, replace(self._made_for, model=manifest.model_fingerprint))
            had = f"{self._tuned.get('tensors')} tensors, {self._tuned.get('bytes')} bytes"
            _refuse_if(reason and f"{reason} ({has}, instead of {had})")
        if self._warn:
            self._warn = False
            log.warning("a group of tensors (%s) was not there when the tuned file was made; it is used all the same", has)


def _key(tuned: Mapping[str, Any]) -> JobKey:
    for field in fields(JobKey):
        if type(tuned.get(field.name)) is not (int if field.name in ("world_size", "hosts") else str):
            raise ConfigError(
                f"the tuned file is not complete: {field.name}={tuned.get(field.name)!r} in its table [tuned]; tune again"
            )
    return JobKey(**{field.name: tuned[field.name] for field in fields(JobKey)})


def _refuse_if(reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(f"the tuned file is for {reason}; tune again for this job, or unset COMMSCHED_CONFIG")


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):  # JSON's escapes are valid TOML, but JSON leaves this one character unescaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)  # an int or a float


def _replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: readers see the old file or the new one, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the tuned file {str(path)!r} cannot be written: {error.strerror}") from error
