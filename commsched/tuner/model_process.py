"""The model in a process of its own. Simulating is a matter of seconds of Python, and in rank 0's process each of them would be
one in which every operation of training waits for the interpreter's lock: steps of 3 ms took 170 ms beside it.

The process reads requests from its stdin and answers on its stdout, a line of JSON each. It ends with its stdin, and so
with rank 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ..core.config import SchedulerConfig
from ..simulator.profile import Profile
from .profiler import Link


class ModelProcess:
    """Makes models, each with a link calibrated from the one before. A context manager: with its end, they are of no use.

    Args:
        profile, link, workers, more: see ``model.Model``.
    """

    def __init__(self, profile: Profile, link: Link, workers: int, **more: Any) -> None:
        self._first = {"profile": profile.to_record(), "link": asdict(link), "workers": workers, **more}

    def __enter__(self) -> RemoteModel:
        command = [sys.executable, "-m", __name__]
        # Of a session of its own: a Ctrl-C is for training.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        try:
            return RemoteModel(self._process, self._ask(self._first)["model"])
        except BaseException:
            self.__exit__()
            raise

    def _ask(self, request: Mapping[str, Any]) -> Any:
        return ask(self._process, request)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not read is not missed
                pipe.close()


class RemoteModel:
    """``trial.StepModel``; made by :class:`ModelProcess`. One thread at a time.

    Every call raises RuntimeError if the model cannot do it, or its process has ended.
    """

    def __init__(self, process: subprocess.Popen[str], number: int) -> None:
        self._process = process
        self._number = number

    def predict(self, config: SchedulerConfig) -> float:
        """See ``model.Model``."""
        return float(ask(self._process, {"of": self._number, "predict": config.to_record()})["seconds"])

    def calibrate(self, trials: Sequence[tuple[SchedulerConfig, float]]) -> RemoteModel:
        """See ``model.Model``."""
        records = [[config.to_record(), seconds] for config, seconds in trials]
        return RemoteModel(self._process, ask(self._process, {"of": self._number, "calibrate": records})["model"])


def ask(process: subprocess.Popen[str], request: Mapping[str, Any]) -> Any:
    """The answer of a model's process.

    Raises:
        RuntimeError: an error there, named; or it has ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except (OSError, ValueError) as error:
        raise RuntimeError(f"the model's process has ended: {error}") from error
    if not line.endswith("\n"):
        raise RuntimeError("the model's process has ended")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def main() -> None:
    """Answer until stdin ends."""
    from .model import Model

    os.nice(19)  # training comes first
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
                    profile, link = Profile.from_record(request.pop("profile")), Link(**request.pop("link"))
                    models.append(Model(profile, link, request.pop("workers"), **request))
                answer = {"model": len(models) - 1}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
