"""What Lightning hands to the user instead of an optimizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from .package import LightningOptimizer


def forward_to_optimizer(wrapper: LightningOptimizer) -> None:
    """From now on, all that ``wrapper`` does not do itself is done by the ScheduledOptimizer that it wraps.

    A ``LightningOptimizer`` becomes an instance of the class of what it wraps, without the state of one, and its ``optimizer``
    is not what that class calls so. Methods of ScheduledOptimizer would run with the wrapper as ``self``.
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
