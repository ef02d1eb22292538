"""Times and sizes of a model's layers, from which bounds and partitions are computed. Needs no engine."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from commsched.simulator.profile import ITEMSIZE, Profile


@dataclass(frozen=True)
class LayerTimes:
    """Lists with one entry for each layer, in order of use in forward: name, median seconds, bytes of all its gradients, and
    bytes of each gradient."""

    names: list[str]
    forward_seconds: list[float]
    backward_seconds: list[float]
    nbytes: list[int]
    tensors: list[list[int]]

    @classmethod
    def of(cls, profile: Profile) -> LayerTimes:
        """The layer times of ``profile``: its layers sleep for these times."""
        layers = profile.layers
        return cls(
            [layer.name for layer in layers],
            [layer.forward_seconds for layer in layers],
            [layer.backward_seconds for layer in layers],
            [layer.nbytes for layer in layers],
            [[ITEMSIZE * prod(shape) for shape in layer.shapes] for layer in layers],
        )
