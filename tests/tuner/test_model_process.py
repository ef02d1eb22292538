"""The model next door gives the numbers of the one here."""

from __future__ import annotations

import pytest

from commsched.core.config import SchedulerConfig
from commsched.simulator.profile import Layer, Profile
from commsched.tuner.model import Model
from commsched.tuner.model_process import ModelProcess
from commsched.tuner.profiler import Link

PROFILE = Profile("test", tuple(Layer(f"layer{i}", ((500_000,),), 0.01, 0.02) for i in range(6)), "made up")
LINK = Link(1e-8, 1e-4)
TRIALS = [(SchedulerConfig(1_000_000, 4_000_000), 0.31), (SchedulerConfig(250_000, 500_000), 0.29)]


def test_it_says_what_the_model_says_before_and_after_calibration() -> None:
    here = Model(PROFILE, LINK, 2, collective=True)
    with ModelProcess(PROFILE, LINK, 2, collective=True) as there:
        for config, _ in TRIALS:
            assert there.predict(config) == here.predict(config)
        calibrated = there.calibrate(TRIALS)
        for config, _ in TRIALS:
            assert calibrated.predict(config) == here.calibrate(TRIALS).predict(config)
            assert there.predict(config) == here.predict(config)


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
