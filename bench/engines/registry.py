"""The engines of this benchmark, found by name: ``jax`` is ``bench/engines/jax.py``.

Each engine's module has a dictionary ``SYSTEMS``: ``commsched``, and the engine's own ways of data-parallel training, as
functions of a :class:`turn.Turn`. All of them train the same EMULATED layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from commsched.core.errors import ConfigError

from .turn import Train

NAMES = ("tensorflow", "mxnet", "jax")


def systems_of(engine: str) -> Mapping[str, Train]:
    """The systems of ``engine``, by name. Imports the engine.

    Raises:
        ConfigError: there is no such engine, or it is not installed here.
    """
    if engine not in NAMES:
        raise ConfigError(f"engine={engine}: must be one of {', '.join(NAMES)}")
    try:
        found: Mapping[str, Train] = import_module(f"bench.engines.{engine}").SYSTEMS
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(("bench", "commsched")):
            raise
        raise ConfigError(
            f'engine={engine}: {error}: pip install "commsched[{engine}]", or take the environment that has it, which in a '
            f"checkout is .venv-{engine}/bin/python after make test"
        ) from error
    return found
