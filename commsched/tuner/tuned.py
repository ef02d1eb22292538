"""tuned.toml: what tuning found, as settings to start from, and the jobs that it is for.

``COMMSCHED_CONFIG`` names it, and ``Settings`` reads it. What fits one model on one network may be slow for another, without a
sign; so a job that it was not made for refuses it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..core.config import Settings
from ..core.errors import ConfigError
from ..core.manifest import Manifest
from .verdict import Verdict

log = logging.getLogger("commsched")


@dataclass(frozen=True, slots=True)
class Key:
    """What a result of tuning is for: the tensors of the group that it was tuned for (``Manifest.model_fingerprint``), and the
    job as ``describe_transport`` and ``link.describe_link`` of rank 0 put it. ``hosts``: number of machines."""

    model: str
    world_size: int
    hosts: int
    transport: str
    link: str

    def to_record(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def describe_transport(name: str, settings: Settings) -> str:
    """The transport ``name`` with the settings that change what is fast on it: ``ps over tcp, 2 servers, wire=bfloat16``."""
    parts = [f"{name} over {settings.lane}" if name == "ps" else name]
    if settings.servers:
        parts.append(f"{len(settings.servers)} servers")
    if settings.order != "agreed":
        parts.append(f"order={settings.order}")
    if settings.wire != "none":
        parts.append(f"wire={settings.wire}")
    if settings.hierarchy != "auto":
        parts.append(f"hierarchy={settings.hierarchy}")
    return ", ".join(parts)


def write_tuned(
    path: str | Path,
    verdict: Verdict,
    key: Key,
    manifest: Manifest,
    *,
    groups: Iterable[Manifest] = (),
    version: str,
) -> None:
    """Replace the file ``path``, at once and whole, by what is kept; also where that is what was set before, so that the next
    start need not tune again.

    Args:
        verdict: a finished one.
        manifest: the tensors that ``key`` names.
        groups: those of all other groups that plugins have registered.
        version: of commsched; only to be read by people.

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
        **key.to_record(),
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


def why_not(made_for: Key, job: Key) -> str | None:
    """Why a result made for one job does not fit another, in words; None: it fits."""
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
    """Check the table ``tuned`` of a settings file against what is known of a job when its session opens. On rank 0: other
    machines may name their links differently.

    Raises:
        ConfigError: names what differs, or what is missing in the table.
    """
    made_for = _key(tuned)
    _refuse_if(why_not(made_for, Key(made_for.model, world_size, hosts, transport, link)))


class ModelCheck:
    """Checks the table ``tuned`` against the groups of tensors that plugins register, in their order, on every rank.

    A job whose first group was not there when the file was made is another job. One that has had a group of it is not: what
    else it trains later, or trained only after it was tuned, is no reason to end it in the middle.

    Args:
        warn: say so once, in a warning, when there is such a group.

    Raises:
        ConfigError: something is missing in the table.
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
            ConfigError: the job that the file is for had no such group, and this one has registered none yet that it had.
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


def _key(tuned: Mapping[str, Any]) -> Key:
    for field in fields(Key):
        if type(tuned.get(field.name)) is not (int if field.name in ("world_size", "hosts") else str):
            raise ConfigError(
                f"the tuned file is not complete: {field.name}={tuned.get(field.name)!r} in its table [tuned]; tune again"
            )
    return Key(**{field.name: tuned[field.name] for field in fields(Key)})


def _refuse_if(reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(f"the tuned file is for {reason}; tune again for this job, or leave it away (COMMSCHED_CONFIG)")


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):  # JSON's escapes are TOML's too, but it leaves this one character as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)  # an int or a float


def _replace(path: Path, text: str) -> None:
    """Nobody sees half of it."""
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
