"""Records the layers of a model and their times while a rank that is alone trains it, for ``commsched predict``."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from ..core.errors import ClosedError, error_text
from ..core.interfaces import SessionObserver
from ..core.manifest import Manifest
from ..transports.open import detect_capabilities
from ..tuner.meter import StepTimer
from ..tuner.profiler import Profiler
from .session import Session

log = logging.getLogger("commsched")

#: Steps before the first one that counts, and the number of those that count. The last step that begins ends the record.
WARM_UP_STEPS, RECORDED_STEPS = 10, 20
STEPS_TO_RECORD = WARM_UP_STEPS + RECORDED_STEPS + 1

#: Time limit for the thread when the session closes.
_END_SECONDS = 2.0


def start_recording(session: Session, path: Path) -> None:
    """Write what is learned of the steps of ``session``, whose only rank this is, to ``path`` once :data:`STEPS_TO_RECORD`
    steps of its largest group of gradients have begun. If training ends before, there is no file. Called before the first group
    is registered.

    The file is a JSON object: ``profile`` (see ``Profile.from_record``), ``measures_norms`` (whether the loop waits for norms
    before it updates), ``full_wait`` (as in ``Session.stats``) and ``gloo`` (whether the process has imported a PyTorch with
    gloo). If nothing can be learned of the steps, it has ``error`` alone, which says why.
    """
    meter = StepTimer(lambda report: None)
    session.on_register(meter.add_group)
    session.core.on_step = meter.on_step
    session.use_tuner(meter)  # closes it with the session
    session.is_recorded = True
    session.observer = forward = ForwardMarks()
    arguments = session, meter, forward, path
    thread = threading.Thread(target=_record, args=arguments, name="commsched-record", daemon=True)
    thread.start()
    session.cleanup.callback(thread.join, _END_SECONDS)


def _record(session: Session, meter: StepTimer, forward: ForwardMarks, path: Path) -> None:
    try:
        while (main := meter.wait_until_training(WARM_UP_STEPS)) is not None:
            found = _observe(session, meter, forward, *main)
            if found is not None:
                break
        else:
            return  # training has ended
    except ClosedError:
        return
    except Exception as error:
        log.error("the layers cannot be recorded", exc_info=error)
        found = {"error": error_text(error)}
    written = path.with_suffix(".part")
    written.write_text(json.dumps(found))
    os.replace(written, path)  # whoever looks for the file finds all of it


def _observe(
    session: Session, meter: StepTimer, forward: ForwardMarks, group: int, manifest: Manifest
) -> dict[str, Any] | None:
    """Observe the next steps of ``group``, and return what is to be written. None if training ends first, or a larger group is
    trained."""
    profiler = Profiler(group, RECORDED_STEPS)
    forget = [session.observe(profiler), session.observe(forward)]
    forward.follow(group, manifest, profiler)
    goes_on = meter.wait_for_steps(group, RECORDED_STEPS + 1)
    profiler.stop()
    for each in forget:
        each()
    if not goes_on:
        return None
    profile = profiler.layers(manifest)
    if profile is None:
        return {"error": f"{RECORDED_STEPS} steps were observed, none of them complete"}
    return {
        "profile": profile.to_record(),
        "measures_norms": session.core.measures_norms(group),
        "full_wait": session.stats()["full_wait"],
        "gloo": detect_capabilities().gloo,
    }


class ForwardMarks(SessionObserver):
    """Notes when each module's forward begins. With several ranks waits for averages show when a parameter is read; a rank that
    is alone never waits. Any thread may call it."""

    def __init__(self) -> None:
        self._profiler: Profiler | None = None
        self._group = -1
        self._first: dict[str, str] = {}  # by module: the first of its own parameters
        self._missing: set[int] = set()  # gradients of the current step
        self._all: frozenset[int] = frozenset()

    def follow(self, group: int, manifest: Manifest, profiler: Profiler) -> None:
        """From now on, tell ``profiler`` when the forward of each module of ``group`` begins, as a wait of no length for the
        module's first parameter."""
        own = defaultdict(list)
        for spec in manifest.tensors:
            own[spec.name.rpartition(".")[0]].append(spec.name)
        self._first = {module: names[0] for module, names in own.items()}
        self._group, self._all = group, frozenset(range(len(manifest.tensors)))
        self._missing = set(self._all)
        self._profiler = profiler

    def on_step(self, group: int, step: int, at: float) -> None:
        if group == self._group:
            self._missing = set(self._all)

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        if group == self._group:
            self._missing.discard(tensor)

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        # A forward within backward (activation checkpointing) is a part of backward.
        if self._profiler is not None and track == "forward" and name in self._first and not self._missing:
            self._profiler.on_span("wait", self._first[name], start, start)
