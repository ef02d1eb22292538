"""The systems that are compared, found by name: ``ddp-tuned`` is ``bench/systems/ddp_tuned.py``.

To add a system, add one file here with a function ``make_system(context)`` that returns a :class:`System`. The system trains a
model of ``context.workload`` with plain SGD of ``LEARNING_RATE`` and averages its gradients over all ranks. A system on Horovod
would need little more than a wrapped optimizer. Import optional packages inside that function, and raise UnsupportedError if
they are missing.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from commsched.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..harness.timeline import Recorder
    from .context import Context

#: Shared modules of this package that are not systems.
_SHARED = frozenset({"context", "gloo", "scheduled", "spec"})

#: Systems whose gradients travel by a transport of commsched; the transport may be chosen for each (``spec.py``).
ON_COMMSCHED = frozenset({"commsched", "fifo", "p3", "serial", "tictac", "wfbp"})


@dataclass(frozen=True)
class Setup:
    """The setup of a system. ``transport`` is the transport of its gradients. ``words`` describes the rest for readers.
    ``message_seconds`` is the overhead of one message, besides its bytes. The sizes are None for a system without
    partitions."""

    transport: str
    words: str
    message_seconds: float | None
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    fusion_bytes: int | None = None


class System(Protocol):
    """One way to train. A turn is ``begin``, then several times ``forward`` and ``update``, then ``end``. All are collective.

    ``initial`` holds the weights from which every turn starts.
    """

    setup: Setup
    model: torch.nn.Module
    initial: list[torch.Tensor]

    def begin(self) -> None:
        """Restore the initial weights, and switch to this system's configuration, which is in use two steps later at the
        latest."""
        ...

    def require_ready(self) -> None:
        """Raise CommschedError unless the system runs with its configuration. Called when steps begin to count."""
        ...

    def forward(self, step: int) -> torch.Tensor:
        """The loss of this rank's batch."""
        ...

    def update(self, loss: torch.Tensor) -> None:
        """Backward, averaging and the optimizer's step. Work that a later step can do may stay outstanding."""
        ...

    def end(self) -> None:
        """Return when every update is complete."""
        ...

    def observe(self, recorder: Recorder) -> None:
        """Report all further messages to ``recorder``. Called once, after the last turn."""
        ...


def names() -> list[str]:
    """The names of all systems, sorted."""
    modules = (module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)
    return sorted(name.replace("_", "-") for name in modules)


def require(name: str) -> str:
    """Return ``name`` if there is such a system.

    Raises:
        ConfigError: there is no such system; the message lists all systems.
    """
    if name not in names():
        raise ConfigError(f"systems: {name!r} is unknown; there are: {', '.join(names())}")
    return name


def make(name: str, context: Context) -> System:
    """Make the system of that name. Collective. The system may train for a while to find its best settings."""
    module = import_module(f"{__name__}.{require(name).replace('-', '_')}")
    system: System = module.make_system(context)
    return system
