"""A profile's tensors, and how a system groups them for sending."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..core.manifest import Manifest, TensorSpec
from ..core.plan import Partition, Plan, cut
from .profile import Profile
from .scenario import Rules


@dataclass(frozen=True)
class Tensors:
    """A profile's parameters in forward order. ``layer_of[t]`` is the layer that tensor ``t`` belongs to."""

    manifest: Manifest
    layer_of: tuple[int, ...]

    @classmethod
    def of(cls, profile: Profile) -> Tensors:
        specs, layer_of = [], []
        for index, layer in enumerate(profile.layers):
            for number, shape in enumerate(layer.shapes):
                specs.append(TensorSpec(f"{layer.name}.{number}" if number else layer.name, shape, "float32"))
                layer_of.append(index)
        return cls(Manifest(tuple(specs)), tuple(layer_of))

    def layers_in(self, partition: Partition) -> list[int]:
        """Return the layers that have elements in ``partition``, front-most first, each once."""
        return sorted({self.layer_of[tensor] for tensor in partition.tensors})


@dataclass(frozen=True)
class Grouping:
    """A plan, and the layers that each of its partitions belongs to."""

    tensors: Tensors
    plan: Plan

    @classmethod
    def of(cls, profile: Profile, rules: Rules) -> Grouping:
        """Group the tensors of ``profile`` under ``rules``."""
        tensors = Tensors.of(profile)
        if rules.bucket_bytes is None:
            return cls(tensors, cut(tensors.manifest, rules.config.partition_bytes, rules.config.fusion_bytes))
        return cls(tensors, fill_buckets(tensors.manifest, rules.bucket_bytes, rules.first_bucket_bytes))

    @cached_property
    def layers_of(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each partition, front-most first."""
        return tuple(tuple(self.tensors.layers_in(partition)) for partition in self.plan.partitions)

    def label(self, partition: int) -> str:
        """Return the name of a partition for timelines."""
        tensors = self.plan.partitions[partition].tensors
        name = self.tensors.manifest.tensors[tensors[0]].name
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
