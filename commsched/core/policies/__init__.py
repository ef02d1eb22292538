"""Scheduling policies, found by name: each module ``commsched.core.policies.<name>`` defines ``make_policy()``."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType

from ..errors import ConfigError
from ..scheduler import Policy


def policy_names() -> list[str]:
    return sorted(_modules())


@cache
def _modules() -> dict[str, ModuleType]:
    """The modules of all policies, by name. All are loaded at the first call: later this process may be out of file
    descriptors."""
    return {module.name: import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)}


def make_policy(name: str) -> Policy:
    """Make a new policy of that name.

    Raises:
        ConfigError: there is no such policy; the message lists all policies.
    """
    module = _modules().get(name)
    if module is None:
        raise ConfigError(f"policy '{name}' is unknown; there are: {', '.join(policy_names())}")
    policy: Policy = module.make_policy()
    return policy
