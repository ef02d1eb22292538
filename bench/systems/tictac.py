"""tictac: priority order of whole tensors, neither cut nor merged (S. H. Hashemi et al., "TicTac", MLSys 2019)."""

from __future__ import annotations

from dataclasses import replace

from commsched.core.scheduler import MAX_PARTITION_BYTES

from ..harness.simulated import PartitionRules
from ..harness.system import Context, System, SystemInfo


def make_system(context: Context) -> System:
    from ..harness.scheduled import ScheduledSystem, commsched_config, megabytes

    # The credit is commsched's: a tensor larger than the credit is sent alone, and small tensors do not wait for each other's
    # acknowledgement.
    config = replace(commsched_config(context), partition_bytes=MAX_PARTITION_BYTES, fusion_bytes=1)
    return ScheduledSystem(context, config, words=f"whole tensors, credit {megabytes(config.credit_bytes)}")


SYSTEM = SystemInfo(80, "#56B4E9", ">", PartitionRules("priority", MAX_PARTITION_BYTES, fusion_bytes=1), make_system)
