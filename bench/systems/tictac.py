"""tictac: priority of whole tensors, neither cut nor merged (S. H. Hashemi et al., "TicTac", MLSys 2019)."""

from __future__ import annotations

from dataclasses import replace

from commsched.core.config import MAX_PARTITION_BYTES

from . import System
from .context import Context
from .scheduled import ScheduledSystem, commsched_config, megabytes


def make_system(context: Context) -> System:
    # commsched's credit: a tensor beyond it goes alone, and small ones do not wait for each other's acknowledgement.
    config = replace(commsched_config(context), partition_bytes=MAX_PARTITION_BYTES, fusion_bytes=1)
    return ScheduledSystem(context, config, words=f"whole tensors, credit {megabytes(config.credit_bytes)}")
