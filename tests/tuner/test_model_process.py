"""The model next door gives the numbers of the one here."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commsched.core.scheduler import SchedulerConfig
from commsched.simulator.profile import LayerProfile, Profile
from commsched.tuner.model import Model
from commsched.tuner.model_process import ModelProcess
from commsched.tuner.profiler import LinkEstimate
from commsched.tuner.trials import Stopped
from tests.jobs.job import ROOT, gone

PROFILE = Profile("test", tuple(LayerProfile(f"layer{i}", ((500_000,),), 0.01, 0.02) for i in range(6)), "made up")
LINK = LinkEstimate(1e-8, 1e-4)
TRIALS = [(SchedulerConfig(1_000_000, 4_000_000), 0.31), (SchedulerConfig(250_000, 500_000), 0.29)]


def test_it_says_what_the_model_says_before_and_after_calibration() -> None:
    here = Model(PROFILE, LINK, 2, ordered=True)
    with ModelProcess(PROFILE, LINK, 2, ordered=True) as there:
        for config, _ in TRIALS:
            assert there.predict(config) == here.predict(config)
        calibrated = there.calibrate(TRIALS)
        for config, _ in TRIALS:
            assert calibrated.predict(config) == here.calibrate(TRIALS).predict(config)
            assert there.predict(config) == here.predict(config)


def test_an_entry_of_the_path_that_python_passes_over_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), *sys.path])
    with ModelProcess(PROFILE, LINK, 2) as model:
        assert model.predict(TRIALS[0][0]) > 0


def test_an_error_there_is_named_here_and_ends_nothing() -> None:
    with ModelProcess(PROFILE, LINK, 2) as model:
        with pytest.raises(RuntimeError, match=r"^ValueError: not the times of steps: \[-1"):
            model.calibrate([(SchedulerConfig(), -1.0)])
        assert model.predict(SchedulerConfig()) > 0


def test_one_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ValueError: 1 workers"), ModelProcess(PROFILE, LINK, 1):
        pass


def test_after_the_end_there_is_no_answer() -> None:
    with ModelProcess(PROFILE, LINK, 2) as model:
        pass
    with pytest.raises(RuntimeError, match="process has ended"):
        model.predict(SchedulerConfig())


def test_who_waits_for_an_answer_is_stopped_when_it_is_cancelled() -> None:
    process = ModelProcess(PROFILE, LINK, 4)
    with process as model, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(model.calibrate, [(SchedulerConfig(64_000, 64_000), 0.3)] * 4)
        process.cancel()
        with pytest.raises(Stopped):
            slow.result(60)
        with pytest.raises(Stopped):
            model.predict(SchedulerConfig())


HOLDER = """
import threading
from commsched.core.scheduler import SchedulerConfig
from tests.tuner.test_model_process import LINK, PROFILE, ModelProcess

def hold():
    with ModelProcess(PROFILE, LINK, 2) as model:
        model.predict(SchedulerConfig())
        print(model._process._process.pid, flush=True)
        threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
threading.Event().wait()
"""


def test_it_does_not_outlive_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        holder.kill()
    assert gone(pid)
