"""The simulator's predictions for a grid, from what the tuner's own profiler saw in its job."""

from __future__ import annotations

from dataclasses import dataclass

from commsched.core.config import SchedulerConfig
from commsched.simulator.profile import Profile
from commsched.tuner.model import Model
from commsched.tuner.profiler import Link
from commsched.tuner.seeds import seeds

from ..measure import median_absolute_error
from .grid import Row
from .surface import Surface


@dataclass(frozen=True)
class Prediction:
    """What a searcher is given. ``model`` keeps what it has simulated: not thread-safe. Searchers that calibrate it get another
    one by that, so all of them begin with the same."""

    seeds: list[SchedulerConfig]
    model: Model

    @classmethod
    def of(cls, row: Row) -> Prediction:
        """As the tuner makes it online (``commsched.tuner.search``). ``row``: of a grid, see ``grid.measure``."""
        profiled, incumbent = row["profiled"], SchedulerConfig(**row["incumbent"])
        profile, times = Profile.from_record(profiled["profile"]), profiled["link"]
        link = Link(times["seconds_per_byte"], times["partition_seconds"])
        collective = row["transport"] != "ps"
        model = Model(profile, link, row["workers"], collective=collective, anchor_bytes=incumbent.partition_bytes)
        likely = seeds(profile, link, row["workers"], collective=collective, policy=incumbent.policy)
        return cls(likely, model.calibrate([(incumbent, profiled["step_seconds"])]))

    def error(self, surface: Surface) -> float:
        """The median absolute one over the grid, as a part."""
        return median_absolute_error((seconds, self.model.predict(config)) for config, seconds in surface.seconds.items())
