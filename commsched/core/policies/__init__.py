"""Scheduling policies, found by name: ``commsched.core.policies.<name>`` defines ``make_policy()``."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from ..errors import ConfigError
from ..scheduler import Policy


def policy_names() -> list[str]:
    """Names of all policies there are, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def make_policy(name: str) -> Policy:
    """A new policy of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in policy_names():
        raise ConfigError(f"policy '{name}' is unknown; there are: {', '.join(policy_names())}")
    policy: Policy = import_module(f"{__name__}.{name}").make_policy()
    return policy
