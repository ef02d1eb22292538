"""One rank of trainings with torch's DDP over gloo: ddp_rank.py OUT MODEL .... It meets in OUT.store and saves
OUT.<model>.<rank>."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from tests.bench.workloads.test_training import WORKLOADS
from tests.bench.workloads.training import make_optimizer, train_rank, weights


def main() -> None:
    out, *names = sys.argv[1:]
    rank, world_size = int(os.environ["COMMSCHED_RANK"]), int(os.environ["COMMSCHED_WORLD_SIZE"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks the host name up
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world_size)
    for name in names:
        workload = WORKLOADS[name]()
        model = workload.make_model()
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=0.1, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        train_rank(workload, wrapped, make_optimizer(model), rank)
        torch.save(weights(model), f"{out}.{name}.{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then keep the interpreter from ending


if __name__ == "__main__":
    main()
