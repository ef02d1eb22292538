"""Searchers, found by name: ``commsched.tuner.searchers.<name>`` defines ``make_searcher``, as here without the name, and
``USES_MODEL``: whether it looks at seeds and model; where not, nobody need make them."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ...core.config import SchedulerConfig
from ...core.errors import ConfigError
from ..space import Space
from ..trial import Searcher, StepModel


def searcher_names() -> list[str]:
    """Names of all searchers there are, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def uses_model(name: str) -> bool:
    """Whether seeds and a model are of any use to the searcher of that name.

    Raises:
        ConfigError: there is none of that name.
    """
    return bool(_module(name).USES_MODEL)


def make_searcher(
    name: str,
    space: Space,
    *,
    seeds: Sequence[SchedulerConfig] = (),
    model: StepModel | None = None,
    random_seed: int = 0,
) -> Searcher:
    """A new searcher of that name; equal arguments and answers make equal questions.

    All of them ask for the incumbent first, unless they were told of it, and never twice for one configuration: what noise
    makes doubtful, a comparison at the end decides. Without a ``tell`` in between, ``ask`` repeats itself.

    Args:
        seeds: configurations worth trying early, best first. Not all use them, nor ``model``: see :func:`uses_model`.
        model: is asked for each configuration once, and once more after the first few trials, which calibrate it. What it
            cannot tell of counts as slow as the slowest that it can.

    Raises:
        ConfigError: there is none of that name, or what it is made with is not installed; the message says what to do.
    """
    searcher: Searcher = _module(name).make_searcher(space, seeds, model, random_seed)
    return searcher


def _module(name: str) -> Any:
    if name not in searcher_names():
        raise ConfigError(f"tune_by={name!r} is unknown; there are: {', '.join(searcher_names())}")
    return import_module(f"{__name__}.{name}")
