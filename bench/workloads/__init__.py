"""Models by name, and the workload of a rank: a model and the loss of each step, EMULATED or REAL.

This module imports no engine: profiles are files, and a model is imported when it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from commsched import ConfigError
from commsched.simulator.profile import LayerProfile, Profile, read_profile

if TYPE_CHECKING:
    import torch

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
        return _uniform()
    if name_or_path not in _DERIVED and not name_or_path.endswith(".json"):
        raise ConfigError(f"model={name_or_path}: must be one of {', '.join(model_names())}, or a profile's .json file")
    path = PROFILES / f"{name_or_path}.json" if name_or_path in _DERIVED else Path(name_or_path)
    try:
        return read_profile(path)
    except ValueError as error:
        raise ConfigError(f"model={name_or_path}: {error}") from error


def profile_digest(name_or_path: str) -> str | None:
    """A digest of the file that :func:`load_profile` would read; None for a model by its name, or if there is no such file."""
    if not name_or_path.endswith(".json"):
        return None
    try:
        return hashlib.blake2b(Path(name_or_path).read_bytes(), digest_size=6).hexdigest()
    except OSError:
        return None


_LAYERS = 24
_ELEMENTS = 750_000


def _uniform() -> Profile:
    """24 equal layers of 3 MB, with backward twice as long as forward. The closed forms are exact for it."""
    layer_seconds = 1.0 / (3 * _LAYERS)  # one second a step
    layers = (LayerProfile(f"layer{i}", ((_ELEMENTS,),), layer_seconds, 2 * layer_seconds) for i in range(_LAYERS))
    return Profile("uniform", tuple(layers), "equal layers by definition")


class Workload(Protocol):
    @property
    def emulated(self) -> bool:
        """Whether the layers sleep for the time that a GPU would take."""
        ...

    @property
    def device(self) -> str:
        """The device of the model, as torch names it."""
        ...

    def make_model(self) -> torch.nn.Module:
        """A new model. Its weights are the same at every call and on every rank."""
        ...

    def loss(self, model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        """Run the forward of this rank's batch of this step. ``model`` may be wrapped. Equal arguments give equal numbers."""
        ...

    def untimed(self) -> Workload:
        """A workload with the same numbers but without sleeping, for reference results."""
        ...


def make_workload(spec: Mapping[str, Any], world_size: int) -> Workload:
    """A workload from JSON: ``{"kind": "emulated", "profile": Profile.to_record()}`` or ``{"kind": "real", "model": name}``,
    which may have a ``"device"``.

    Raises:
        ConfigError: there is no such REAL model.
        ValueError: the profile is invalid, or the kind is unknown.
    """
    if world_size < 1:
        raise ValueError(f"a job has at least 1 worker, not {world_size}")
    if spec["kind"] == "emulated":
        from .emulated import EmulatedWorkload

        return EmulatedWorkload(Profile.from_record(spec["profile"]))
    if spec["kind"] == "real":
        from .real import make_real

        return make_real(spec["model"], spec.get("device", "cpu"))
    raise ValueError(f"a workload is emulated or real, not {spec['kind']!r}")
