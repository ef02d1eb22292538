"""Searchers, found by name. The module ``commsched.tuner.searchers.<name>`` defines ``make_searcher``, with the arguments of
the function here except the name. It also defines ``USES_MODEL``: whether the searcher uses seeds and a model; if not, the
caller need not make them."""

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
    """The names of all searchers, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def uses_model(name: str) -> bool:
    """Whether the searcher ``name`` uses seeds and a model.

    Raises:
        ConfigError: there is no searcher of that name.
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
    """A new searcher of that name. It is deterministic: equal arguments and equal results of trials give equal proposals.

    Each searcher proposes the incumbent first, unless it already has a trial of it. It never proposes a configuration twice,
    because the comparison at the end settles doubts from noise. ``ask`` returns the same proposal until the next ``tell``.

    Args:
        seeds: configurations to try early, best first. Not all searchers use seeds and ``model``; see :func:`uses_model`.
        model: predicts each configuration once, and once more after the first few trials, which calibrate it. A configuration
            that it cannot predict counts as slow as the slowest one that it can.

    Raises:
        ConfigError: there is no searcher of that name, or a package that it needs is not installed; the message says what to
            do.
    """
    searcher: Searcher = _module(name).make_searcher(space, seeds, model, random_seed)
    return searcher


def _module(name: str) -> Any:
    if name not in searcher_names():
        raise ConfigError(f"tune_by={name!r} is unknown; there are: {', '.join(searcher_names())}")
    return import_module(f"{__name__}.{name}")
