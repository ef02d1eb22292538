"""Runs a training script as one process until its layers and their times are known, for ``commsched predict``."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import ConfigError
from ..core.standard_streams import say_error
from ..session.recording import STEPS_TO_RECORD
from ..simulator.profile import Profile
from . import launch

#: The interval at which this process looks for the record, which the script's process writes.
_LOOK_SECONDS = 0.2

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class RecordedScript:
    """A training script's layers and its loop. ``clips``: it clips by the norm of the averages, or reads it. ``waits``: the
    line that waits for all averages for another reason, and the reason; None if there is none. ``gloo``: it has imported a
    PyTorch with gloo."""

    profile: Profile
    clips: bool
    waits: str | None
    gloo: bool


def record_script(script: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> RecordedScript:
    """Run ``script`` until ``STEPS_TO_RECORD`` steps are over, and end it then. It prints on stderr. Main thread only.

    Raises:
        ConfigError: the script could not be run, failed, or ended before; or nothing can be learned of its steps.
        KeyboardInterrupt: a signal interrupted it.
    """
    say_error(f"commsched: {script} runs as one process until it has trained {STEPS_TO_RECORD} steps")
    handlers = {number: signal.getsignal(number) for number in _STOPS}
    try:
        with tempfile.TemporaryDirectory(prefix="commsched-") as directory:
            path = Path(directory, "record.json")
            code = _run([sys.executable, str(script), *arguments], {**environ, "COMMSCHED_RECORD": str(path)}, path)
            found = json.loads(path.read_text()) if path.exists() else None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if found is None and code - 128 in _STOPS:
        raise KeyboardInterrupt
    if found is None:
        hint = "if it printed an error, that is above" if code else "is line 2 in it, and does it train for long enough?"
        raise ConfigError(
            f"{script} ended with exit code {code}, before {STEPS_TO_RECORD} steps of a ScheduledOptimizer (PyTorch) were "
            f"over; {hint}"
        )
    if "error" in found:
        raise ConfigError(f"the layers of {script} cannot be recorded: {found['error']}")
    wait = found["full_wait"]
    profile = replace(Profile.from_record(found["profile"]), model=script.name)
    waits = None if wait is None or found["measures_norms"] else f"{wait['line']} ({wait['why']})"
    return RecordedScript(profile, found["measures_norms"], waits, found["gloo"])


def _run(command: Sequence[str], environ: Mapping[str, str], path: Path) -> int:
    """Run ``command`` as the only rank of a job until ``path`` is there. Returns the exit code."""
    ended = threading.Event()
    main_thread = threading.get_ident()

    def follow() -> None:
        while not ended.wait(_LOOK_SECONDS):
            if path.exists():
                signal.pthread_kill(main_thread, signal.SIGTERM)  # the launcher ends the job
                return

    follower = threading.Thread(target=follow, name="commsched-follow", daemon=True)
    follower.start()
    try:
        return launch.run(1, 0, command, environ, stdout=sys.stderr.fileno())
    finally:
        ended.set()
        follower.join()
