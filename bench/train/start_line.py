"""Where ranks meet: they start together, and with the configuration that is wanted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from commsched.core.config import SchedulerConfig
from commsched.core.errors import TransportError

from ..arguments import FLOAT32_BYTES
from ..collectives import average, register

if TYPE_CHECKING:
    from commsched.session import Session

_SWITCH_SECONDS = 30.0


class StartLine:
    """A tensor of one number, whose average no rank has before every rank has come. Collective."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._group = register(session, "start line", FLOAT32_BYTES)[1]

    def meet(self) -> None:
        """Return when every rank has called it."""
        average(self._group)

    def switch(self, config: SchedulerConfig) -> None:
        """Return when every rank has taken over ``config``. Another group cuts its tensors anew at its next step but one at the
        latest: the step that it may begin without being asked is still with the old partitions.

        Raises:
            TransportError: the ranks did not all do so in half a minute.
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
            self.meet()  # configurations change where a step begins
