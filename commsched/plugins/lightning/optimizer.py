"""LightningOptimizer, the wrapper that Lightning gives to the user instead of an optimizer, around a ScheduledOptimizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from .package import LightningOptimizer


def forward_to_optimizer(wrapper: LightningOptimizer) -> None:
    """Make ``wrapper`` forward every attribute that it does not define itself to the ScheduledOptimizer that it wraps.

    A ``LightningOptimizer`` changes its class to a subclass of the wrapped object's class, but does not have the state of such
    an object, and its attribute ``optimizer`` has another meaning than in ScheduledOptimizer. Without the forwarding, methods
    of ScheduledOptimizer would run with the wrapper as ``self``.
    """
    kind: Any = type(wrapper)
    wrapper.__class__ = _forwarding(kind)


@cache
def _forwarding(kind: type) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        if name in attributes or name in vars(LightningOptimizer) or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(attributes["_optimizer"], name)

    return type(kind.__name__, (kind,), {"__getattribute__": __getattribute__})
