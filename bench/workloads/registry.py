"""Models by name. This module imports no engine: profiles are files, and a REAL model is imported when it is made."""

from __future__ import annotations

from pathlib import Path

from commsched.core.errors import ConfigError
from commsched.simulator.profile import Profile, read_profile

from . import uniform

PROFILES = Path(__file__).parent / "profiles"
_DERIVED = ("vgg16", "resnet50", "bert-base", "gpt2-small")


def model_names() -> tuple[str, ...]:
    """The models that have a profile."""
    return ("uniform", *_DERIVED)


def real_model_names() -> tuple[str, ...]:
    """The models that have a reduced form for this machine's own arithmetic."""
    return model_names()


def load_profile(name_or_path: str) -> Profile:
    """The profile of a model by its name, or from a file if it ends in ``.json``.

    Raises:
        ConfigError: there is no such model, or the file cannot be read or is not a profile; the message says which.
    """
    if name_or_path == "uniform":
        return uniform.make_profile()
    if name_or_path not in _DERIVED and not name_or_path.endswith(".json"):
        raise ConfigError(f"model={name_or_path}: must be one of {', '.join(model_names())}, or a profile's .json file")
    path = PROFILES / f"{name_or_path}.json" if name_or_path in _DERIVED else Path(name_or_path)
    try:
        return read_profile(path)
    except ValueError as error:
        raise ConfigError(f"model={name_or_path}: {error}") from error
