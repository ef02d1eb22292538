"""The model in a process of its own. A simulation takes seconds of Python. In rank 0's process it would make every operation of
training wait for the interpreter's lock: steps of 3 ms took 170 ms beside it.

The process reads requests from its stdin and answers on its stdout, one line of JSON each. It ends when its stdin ends, or when
the thread that started it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ..core.errors import error_text
from ..core.scheduler import SchedulerConfig
from ..simulator.profile import Profile
from .profiler import LinkEstimate
from .trials import Stopped

_PR_SET_PDEATHSIG = 1


class ModelProcess:
    """Makes models, each with a link calibrated from the previous model. A context manager; its models cannot be used after it
    ends.

    Args:
        profile, link, workers, more: see ``model.Model``.
    """

    def __init__(self, profile: Profile, link: LinkEstimate, workers: int, **more: Any) -> None:
        self._first = {"profile": profile.to_record(), "link": asdict(link), "workers": workers, **more}
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False

    def __enter__(self) -> RemoteModel:
        # The child is in this process's group, because launchers end whole groups. It gets this process's path, to which the
        # script may have added, even what Python passes over.
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._cancelled:  # just before
            self._process.kill()
        try:
            return RemoteModel(self, self.ask(self._first))
        except BaseException:
            self.__exit__()
            raise

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send ``request`` and wait for its answer.

        Raises:
            Stopped: :meth:`cancel` was called.
            RuntimeError: the request failed in the process (names the error), or the process has ended.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        if self._cancelled:
            raise Stopped("the model was cancelled")
        if not line.endswith("\n"):
            raise RuntimeError("the model's process has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def cancel(self) -> None:
        """Abort the computation. :meth:`ask` raises Stopped, now and in later calls. Any thread may call it, repeatedly."""
        self._cancelled = True
        if self._process is not None:
            self._process.kill()

    def __exit__(self, *_: object) -> None:
        process = self._process
        assert process is not None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unsent requests do not matter
                pipe.close()


class RemoteModel:
    """A ``StepModel`` made by :class:`ModelProcess`. Its methods raise what ``ModelProcess.ask`` does. One thread at a time."""

    def __init__(self, process: ModelProcess, made: Mapping[str, Any]) -> None:
        self._process = process
        self._number = made["model"]
        self.link = LinkEstimate(**made["link"])

    def predict(self, config: SchedulerConfig) -> float:
        """See ``model.Model``."""
        return float(self._process.ask({"of": self._number, "predict": config.to_record()})["seconds"])

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> RemoteModel:
        """See ``model.Model``."""
        records = [[config.to_record(), seconds] for config, seconds in trials]
        return RemoteModel(self._process, self._process.ask({"of": self._number, "calibrate": records}))


def main() -> None:
    """Answer requests until stdin ends. The kernel kills this process when the thread that started it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for training
    os.nice(19)  # training comes first
    # End of stdin is not enough: processes forked from rank 0, such as DataLoader's, keep our stdin open, and a running
    # simulation does not read it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from .model import Model

    models: list[Model] = []
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "predict" in request:
                answer: dict[str, Any] = {"seconds": models[request["of"]].predict(SchedulerConfig(**request["predict"]))}
            else:
                if "calibrate" in request:
                    trials = [(SchedulerConfig(**config), seconds) for config, seconds in request["calibrate"]]
                    models.append(models[request["of"]].calibrate(trials))
                else:
                    profile, link = Profile.from_record(request.pop("profile")), LinkEstimate(**request.pop("link"))
                    models.append(Model(profile, link, request.pop("workers"), **request))
                answer = {"model": len(models) - 1, "link": asdict(models[-1].link)}
        except Exception as error:
            answer = {"error": error_text(error)}
        print(json.dumps(answer), flush=True)
