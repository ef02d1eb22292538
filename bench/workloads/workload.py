"""The workload of a rank: a model and the loss of each step, EMULATED or REAL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from commsched.simulator.profile import Profile


class Workload(Protocol):
    @property
    def emulated(self) -> bool:
        """Whether the layers sleep for the time that a GPU would take."""
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
    """A workload from JSON: ``{"kind": "emulated", "profile": Profile.to_record()}`` or ``{"kind": "real", "model": name}``.

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

        return make_real(spec["model"])
    raise ValueError(f"a workload is emulated or real, not {spec['kind']!r}")
