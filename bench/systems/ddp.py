"""ddp: torch's DistributedDataParallel over gloo, with its default buckets."""

from __future__ import annotations

from commsched.simulator.scenario import DDP_FIRST_BUCKET_MIB, Exchange

from ..harness.simulated import BucketRules
from ..harness.system import Context, System, SystemInfo


def make_system(context: Context) -> System:
    from ..harness.ddp import DdpSystem, default_buckets

    return DdpSystem(context, *default_buckets(context.bytes_scale))


SYSTEM = SystemInfo(
    40, "#000000", "s", BucketRules(Exchange.ALL_REDUCE, barrier=True, first_bucket_mib=DDP_FIRST_BUCKET_MIB), make_system
)
