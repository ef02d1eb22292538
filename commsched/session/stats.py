"""The numbers of a session for users, and the line at the end of a job."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.core import Core
from ..core.errors import error_text
from ..core.group import TensorGroup
from ..core.pace import REPORT_STEPS
from ..tuner.paced import FullWait, Paced

if TYPE_CHECKING:
    from ..tuner.assessment import Assessment  # which needs the simulator's dependencies


log = logging.getLogger("commsched")


#: The statistics that a logger draws over the steps.
_DRAWN = (
    "step_seconds",
    "compute_seconds",
    "exposed_seconds",
    "late_seconds",
    "bound_seconds",
    "network_bytes_per_second",
    "partition_bytes",
    "credit_bytes",
)


def scalars(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """See ``Session.scalars``. ``record`` is what ``Session.stats`` returned."""
    return {prefix + name: record[name] for name in _DRAWN if record[name] is not None}


class Statistics:
    """Collects what one rank knows of its steps. Any thread may call it.

    Attributes:
        waits_elsewhere: the engine waits for averages where the core does not see it, so nobody knows how long.
        assessment: rank 0's assessment of its steps, once it is made.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._groups: dict[int, TensorGroup] = {}  # those of gradients
        self._full_wait: FullWait | None = None
        self.waits_elsewhere = False
        self.assessment: Assessment | None = None

    def add_group(self, group: TensorGroup) -> None:
        kept = {index: each for index, each in self._groups.items() if not each.is_over or self.paced(index) is not None}
        self._groups = {**kept, group.index: group}

    def add_full_wait(self, wait: FullWait) -> None:
        """Note a line at which all averages are waited for. The one that costs most counts."""
        if self._full_wait is None or wait.seconds > self._full_wait.seconds:
            self._full_wait = wait

    def paced(self, group: int, steps: int = REPORT_STEPS) -> Paced | None:
        """Medians over the last ``steps`` steps of ``group``; None before its first step has ended."""
        pace = self._core.pace(group, steps)
        if pace is None:
            return None
        by_rank = {} if self.waits_elsewhere else self._core.own_parts(group)
        return Paced(
            steps=pace.step + 1,
            step_seconds=pace.whole,
            own_seconds=None if self.waits_elsewhere else pace.own,
            config=self._core.config,
            own_by_rank=by_rank,
            needs_norm=self._core.measures_norms(group),
            full_wait=self._full_wait,
            same_gradients=self._core.same_gradients,
        )

    def last(self) -> Paced | None:
        """The last steps of the largest group of gradients that is trained, or was, if none is any more."""
        return self._main()[1]

    def _main(self) -> tuple[TensorGroup | None, Paced | None]:
        """The group that :meth:`last` is about, with its last steps. Before any step: the largest group."""
        groups = self._largest_first()
        for group in groups:
            if (paced := self.paced(group.index)) is not None:
                return group, paced
        return (groups[0] if groups else None), None

    def _largest_first(self) -> list[TensorGroup]:
        """The groups of gradients, those that were released last."""
        groups = list(self._groups.values())
        return sorted(groups, key=lambda group: (group.is_over, -group.manifest.nbytes))

    def last_lines(self) -> list[str]:
        """The lines at the end of the job; none if the steps were not assessed. Never raises: the job has succeeded."""
        try:
            paced = self.last()
            if self.assessment is None or paced is None:
                return []
            from ..tuner.assessment import last_lines

            return last_lines(self.assessment, paced)
        except Exception as error:
            log.warning("the last steps were not assessed: %s", error_text(error))
            return []

    def record(self) -> dict[str, Any]:
        """See ``Session.stats``."""
        (group, paced), found = self._main(), self.assessment
        own = None if paced is None else paced.own_seconds
        wait = self._full_wait
        per_byte = None if found is None else found.seconds_per_byte
        config = self._core.config
        return {
            "steps": 0 if paced is None else paced.steps,
            "step_seconds": None if paced is None else paced.step_seconds,
            "compute_seconds": own,
            "exposed_seconds": None if paced is None or own is None else paced.step_seconds - own,
            "gradient_bytes": 0 if group is None else group.manifest.nbytes,
            "partition_bytes": config.partition_bytes,
            "credit_bytes": config.credit_bytes,
            "full_wait": None if wait is None else {"line": wait.line, "why": wait.why, "seconds": wait.seconds},
            "same_gradients": list(self._core.same_gradients),
            "slowest_rank": None if found is None else found.slowest_rank,
            "late_seconds": None if found is None or own is None else found.late_seconds,
            "network_bytes_per_second": None if per_byte is None else 1 / per_byte,
            "bound_seconds": None if found is None else found.shown_bound_seconds,
            "bound_16_bits_seconds": None if found is None else found.half_seconds,
            "bound_with_servers_seconds": None if found is None else found.served_seconds,
            "layers": [] if found is None else [dict(layer) for layer in found.layers],
        }
