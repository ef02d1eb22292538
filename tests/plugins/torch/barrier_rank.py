"""A rank that ends by ``sys.exit(1)``, if it is rank 1; the other waits for it in a barrier of ``torch.distributed``."""

from __future__ import annotations

import sys

import torch.distributed as dist

import commsched

dist.init_process_group("gloo")
session = commsched.init(fail_after=100)
session.broadcast("so that both are here", memoryview(bytearray(8)))
if session.rank == 1:
    sys.exit(1)
dist.barrier()
