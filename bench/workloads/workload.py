"""What a rank trains: a model and the loss of each step, EMULATED or REAL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from commsched.simulator.profile import Profile


class Workload(Protocol):
    @property
    def emulated(self) -> bool:
        """Whether its layers sleep for the time a GPU would take."""
        ...

    def make_model(self) -> torch.nn.Module:
        """A new model; its weights are the same at every call and on every rank."""
        ...

    def loss(self, model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        """The forward of this rank's batch of this step. ``model`` may be wrapped; the same arguments, the same numbers."""
        ...

    def untimed(self) -> Workload:
        """The same numbers as fast as this machine computes them, for results to compare with."""
        ...


def make_workload(spec: Mapping[str, Any], world_size: int) -> Workload:
    """A workload from JSON: ``{"kind": "emulated", "profile": Profile.to_record()}`` or ``{"kind": "real", "model": name}``.

    Raises:
        ConfigError: no such REAL model.
        ValueError: the profile is none, or the kind is unknown.
    """
    if world_size < 1:
        raise ValueError(f"a job has at least 1 worker, not {world_size}")
    if spec["kind"] == "emulated":
        from .emulated import EmulatedWorkload

        return EmulatedWorkload(Profile.from_record(spec["profile"]))
    if spec["kind"] == "real":
        from .real import make_real

        return make_real(spec["model"])
    raise ValueError(f"a workload is emulated or real, not {spec['kind']!r}")
