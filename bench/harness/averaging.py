"""Averages one tensor over the ranks, and uses that as a barrier that can also switch the configuration."""

from __future__ import annotations

import time

import numpy as np

from commsched import SchedulerConfig, Session, TransportError
from commsched.core.group import TensorGroup
from commsched.core.manifest import Manifest, TensorSpec

from .arguments import FLOAT32_BYTES

_SWITCH_SECONDS = 30.0


def register(session: Session, name: str, nbytes: int) -> tuple[np.ndarray, TensorGroup]:
    """Register a float32 tensor that the ranks average. Returns its memory and its group, which holds only this tensor."""
    buffer = np.zeros(nbytes // FLOAT32_BYTES, np.float32)
    manifest = Manifest((TensorSpec(name, buffer.shape, "float32"),))
    return buffer, session.register(manifest, {"float32": buffer.view(np.uint8).data})


def average(group: TensorGroup) -> None:
    """Run one step of a group of one tensor."""
    group.begin_step()
    group.notify_ready(0)
    group.proxies[0].wait()


class ConfigBarrier:
    """A barrier made of a tensor with one number: no rank has its average before every rank has arrived. Collective."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._group = register(session, "barrier", FLOAT32_BYTES)[1]

    def wait(self) -> None:
        """Return when every rank has called ``wait``."""
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
            self.wait()  # configurations change at the beginning of a step
