"""Profile: a model as the scheduling sees it, with its layers in forward order, their parameters and their times; and how a
system groups these parameters for sending. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from ..core.errors import error_text
from ..core.manifest import Manifest, TensorSpec
from ..core.plan import Partition, Plan, cut
from .scenario import Exchange, Rules

#: Every parameter of a profile is float32.
ITEMSIZE = 4


@dataclass(frozen=True)
class LayerProfile:
    """A layer. ``shapes`` are the shapes of its parameters and may be empty. Times are per step, without communication."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward_seconds: float
    backward_seconds: float

    @cached_property
    def nbytes(self) -> int:
        return sum(ITEMSIZE * prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Profile:
    """The layers of a model. ``source`` says where the times come from, in words that fit into a table."""

    model: str
    layers: tuple[LayerProfile, ...]
    source: str

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all gradients of one step."""
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def forward_seconds(self) -> float:
        return sum(layer.forward_seconds for layer in self.layers)

    @cached_property
    def backward_seconds(self) -> float:
        return sum(layer.backward_seconds for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @cached_property
    def manifest(self) -> Manifest:
        """The parameters in forward order, each a tensor."""
        specs = []
        for layer in self.layers:
            for number, shape in enumerate(layer.shapes):
                specs.append(TensorSpec(f"{layer.name}.{number}" if number else layer.name, shape, "float32"))
        return Manifest(tuple(specs))

    def scaled(self, *, nbytes: float = 1.0, seconds: float = 1.0) -> Profile:
        """Return the same model with the size of every parameter and every time multiplied by a factor.

        Each parameter keeps at least one element.

        Raises:
            ValueError: a factor is not positive.
        """
        if nbytes <= 0 or seconds <= 0:
            raise ValueError(f"factors of a profile are positive, not {nbytes} and {seconds}")

        def scaled(layer: LayerProfile) -> LayerProfile:
            shapes = layer.shapes if nbytes == 1 else tuple((max(1, round(prod(s) * nbytes)),) for s in layer.shapes)
            return LayerProfile(layer.name, shapes, layer.forward_seconds * seconds, layer.backward_seconds * seconds)

        return Profile(self.model, tuple(map(scaled, self.layers)), self.source)

    def to_record(self) -> dict[str, Any]:
        """Return the profile as JSON, in the format of the files that hold measured profiles."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Profile:
        """The inverse of :meth:`to_record`.

        Raises:
            ValueError: a value is missing, has the wrong type or is out of range. Names the value.
        """
        try:
            layers = tuple(_layer(each) for each in record["layers"])
            profile = cls(str(record["model"]), layers, str(record["source"]))
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not a profile: {error_text(error)}") from error
        if not layers or profile.nbytes == 0 or profile.compute_seconds <= 0:
            raise ValueError(f"not a profile: {profile.model} has no layers, no parameters or no times")
        return profile


def read_profile(path: Path) -> Profile:
    """Read a profile from a JSON file.

    Raises:
        ValueError: the file cannot be read or is not a profile. Names the file.
    """
    try:
        return Profile.from_record(json.loads(path.read_text()))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _layer(record: Mapping[str, Any]) -> LayerProfile:
    shapes = tuple(tuple(int(size) for size in shape) for shape in record["shapes"])
    layer = LayerProfile(str(record["name"]), shapes, float(record["forward_seconds"]), float(record["backward_seconds"]))
    if not (0 <= layer.forward_seconds < float("inf") and 0 <= layer.backward_seconds < float("inf")):
        raise ValueError(f"layer {layer.name} has a time that is negative or not finite")
    if any(size < 1 for shape in shapes for size in shape):
        raise ValueError(f"layer {layer.name} has a parameter without elements")
    return layer


@dataclass(frozen=True)
class Grouping:
    """How a system groups the tensors of ``profile``: a plan, and the layers that each of its partitions belongs to."""

    profile: Profile
    plan: Plan

    @classmethod
    def of(cls, profile: Profile, rules: Rules, shards: int = 1) -> Grouping:
        """Group the tensors of ``profile`` under ``rules``, and spread the partitions of a parameter server over ``shards``."""
        manifest = profile.manifest
        if rules.exchange is not Exchange.PARAMETER_SERVER:
            shards = 1
        if rules.bucket_bytes is None:
            return cls(profile, cut(manifest, rules.config.partition_bytes, rules.config.fusion_bytes, shards))
        return cls(profile, fill_buckets(manifest, rules.bucket_bytes, rules.first_bucket_bytes))

    @cached_property
    def layers_of(self) -> tuple[tuple[int, ...], ...]:
        """The layers that have elements in each partition, front-most first, each once."""
        layer_of = [index for index, layer in enumerate(self.profile.layers) for _ in layer.shapes]  # by tensor
        return tuple(tuple(sorted({layer_of[tensor] for tensor in each.tensors})) for each in self.plan.partitions)

    def label(self, partition: int) -> str:
        """Return the name of a partition for timelines."""
        tensors = self.plan.partitions[partition].tensors
        name = self.plan.manifest.tensors[tensors[0]].name
        return name if len(tensors) == 1 else f"{name} + {len(tensors) - 1}"


def fill_buckets(manifest: Manifest, bucket_bytes: int, first_bucket_bytes: int | None = None) -> Plan:
    """Return the buckets that torch's DistributedDataParallel makes of float32 tensors once it knows the order of gradients.

    Tensors are added to the open bucket from the last to the first. A bucket is closed when it holds at least the limit. A
    tensor is never cut. Buckets are numbered in forward order, as partitions are: the last bucket is sent first.
    """
    buckets: list[list[int]] = []
    held, limit = 0, bucket_bytes if first_bucket_bytes is None else first_bucket_bytes
    for index in reversed(range(len(manifest.tensors))):
        if held == 0:
            buckets.append([])
        buckets[-1].insert(0, index)
        held += manifest.tensors[index].nbytes
        if held >= limit:
            held, limit = 0, bucket_bytes
    partitions = []
    for number, bucket in enumerate(reversed(buckets)):
        start = manifest.offset(bucket[0])
        stop = manifest.offset(bucket[-1]) + manifest.tensors[bucket[-1]].nbytes
        partitions.append(Partition(number, manifest.tensors[bucket[0]].dtype, start, stop, tuple(bucket)))
    return Plan(manifest, tuple(partitions))
