"""One rank of trainings one after another, each in a session of its own: training_rank.py DIRECTORY."""

from __future__ import annotations

import os
import sys

import torch

import commsched
from commsched.core.world import detect_world
from tests.plugins.torch.rank import train

#: Task and policy.
RUNS = [("TransformerEncoderLayer", "priority"), ("tied", "rsag")]


def main() -> None:
    (directory,) = sys.argv[1:]
    world, rendezvous = detect_world(os.environ), os.environ["COMMSCHED_RENDEZVOUS"]
    for task, policy in RUNS:
        os.environ |= {"COMMSCHED_POLICY": policy, "COMMSCHED_RENDEZVOUS": f"{rendezvous}.{task}"}
        torch.save(train("commsched", task, world.rank, world.world_size), f"{directory}/{task}.{world.rank}")
        commsched.shutdown()


if __name__ == "__main__":
    main()
