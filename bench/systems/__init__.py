"""The systems that are compared, found by name: ``ddp-tuned`` is ``bench/systems/ddp_tuned.py``.

A peer is added by one file here: a function ``make_system(context)`` that returns a :class:`System`, which trains a model of
``context.workload`` with plain SGD of ``LEARNING_RATE``, its gradients averaged over all ranks. One on Horovod would wrap the
optimizer and hardly more. What may not be installed is imported in that function, which raises UnsupportedError without it.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from commsched.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..train.timeline import Recorder
    from .context import Context

#: Modules of this package that systems share, and that are none themselves.
_SHARED = frozenset({"context", "gloo", "scheduled", "spec"})

#: Those whose gradients travel by a transport of commsched, which may be chosen for each (``spec.py``).
ON_COMMSCHED = frozenset({"commsched", "fifo", "p3", "serial", "tictac", "wfbp"})


@dataclass(frozen=True)
class Setup:
    """What a system runs with. ``transport`` is what gradients travel by, ``words`` say the rest to readers, and
    ``message_seconds`` is what one message costs besides its bytes. The sizes are None for what is not cut into partitions."""

    transport: str
    words: str
    message_seconds: float | None
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    fusion_bytes: int | None = None


class System(Protocol):
    """One way to train. A turn is ``begin``, some times ``forward`` and ``update``, ``end``; all are collective.

    ``initial`` are the weights that every turn starts from.
    """

    setup: Setup
    model: torch.nn.Module
    initial: list[torch.Tensor]

    def begin(self) -> None:
        """Start from the initial weights, and with this system's configuration two steps later at the latest."""
        ...

    def require_ready(self) -> None:
        """Raise CommschedError unless it runs as it should: called when steps begin to count."""
        ...

    def forward(self, step: int) -> torch.Tensor:
        """The loss of this rank's batch."""
        ...

    def update(self, loss: torch.Tensor) -> None:
        """Backward, averaging and the optimizer's step; what may happen later is left for later."""
        ...

    def end(self) -> None:
        """Return when every update is in place."""
        ...

    def observe(self, recorder: Recorder) -> None:
        """Tell ``recorder`` of what is sent from now on. Called once, after the last turn."""
        ...


def names() -> list[str]:
    """Of all systems there are, sorted."""
    modules = (module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)
    return sorted(name.replace("_", "-") for name in modules)


def require(name: str) -> str:
    """``name``, if there is such a system.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if name not in names():
        raise ConfigError(f"systems: {name!r} is unknown; there are: {', '.join(names())}")
    return name


def make(name: str, context: Context) -> System:
    """The system of that name. Collective; it may train for a while to find its best settings."""
    module = import_module(f"{__name__}.{require(name).replace('-', '_')}")
    system: System = module.make_system(context)
    return system
