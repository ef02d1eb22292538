"""A barrier of all ranks, which can also switch the configuration: ranks start together with the wanted configuration."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from commsched.core.config import SchedulerConfig
from commsched.core.errors import TransportError

from ..collectives import average, register
from .arguments import FLOAT32_BYTES

if TYPE_CHECKING:
    from commsched.session.session import Session

_SWITCH_SECONDS = 30.0


class ConfigBarrier:
    """A barrier made of a tensor with one number: no rank has its average before every rank has arrived. Collective."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._group = register(session, "start line", FLOAT32_BYTES)[1]

    def meet(self) -> None:
        """Return when every rank has called ``meet``."""
        average(self._group)

    def switch(self, config: SchedulerConfig) -> None:
        """Return when every rank uses ``config``. Another group cuts its tensors anew at its next step but one at the latest,
        because it may begin its next step, without asking, with the old partitions.

        Raises:
            TransportError: the ranks did not all switch within half a minute.
        """
        core = self._session.core
        if self._session.rank == 0 and core.config != config:
            self._session.reconfigure(config)
        deadline = time.monotonic() + _SWITCH_SECONDS
        while not all(self._session.gather(core.config == config)):
            if time.monotonic() > deadline:
                raise TransportError(
                    f"rank {self._session.rank} runs {core.config}, and not {config}, after {_SWITCH_SECONDS:g} s"
                )
            self.meet()  # configurations change at the beginning of a step
