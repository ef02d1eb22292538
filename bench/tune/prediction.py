"""The simulator's predictions for a grid, from the measurements of the tuner's profiler in the grid's job."""

from __future__ import annotations

from dataclasses import dataclass

from commsched.core.config import SchedulerConfig
from commsched.simulator.profile import Profile
from commsched.tuner.initial_guesses import seeds
from commsched.tuner.model import Model
from commsched.tuner.profiler import LinkEstimate

from ..harness.measure import median_absolute_error
from .grid import Row
from .surface import Surface


@dataclass(frozen=True)
class Prediction:
    """The seeds and the model for a searcher. ``model`` caches its simulations and is not thread-safe. Calibration makes
    another model, so all searchers start with the same one."""

    seeds: list[SchedulerConfig]
    model: Model

    @classmethod
    def of(cls, row: Row) -> Prediction:
        """Make the prediction as the tuner does online (``commsched.tuner.job``). ``row`` is the row of a grid, see
        ``grid.measure``."""
        profiled, incumbent = row["profiled"], SchedulerConfig(**row["incumbent"])
        profile, times = Profile.from_record(profiled["profile"]), profiled["link"]
        link = LinkEstimate(times["seconds_per_byte"], times["partition_seconds"])
        collective = row["transport"] != "ps"
        model = Model(profile, link, row["workers"], collective=collective, anchor_bytes=incumbent.partition_bytes)
        likely = seeds(profile, link, row["workers"], collective=collective, policy=incumbent.policy)
        return cls(likely, model.calibrate([(incumbent, profiled["step_seconds"])]))

    def error(self, surface: Surface) -> float:
        """The median absolute relative error over the grid."""
        return median_absolute_error((seconds, self.model.predict(config)) for config, seconds in surface.seconds.items())
