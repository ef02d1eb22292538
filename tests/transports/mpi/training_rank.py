"""One rank of trainings one after another, each in a session of its own: training_rank.py RANKS DIRECTORY."""

from __future__ import annotations

import os
import sys

import commsched
from commsched.core.world import detect_world
from tests.plugins.torch.rank import train

#: Task and policy, by number of ranks.
RUNS = {2: [("MLP", "priority"), ("TransformerEncoderLayer", "priority"), ("LSTM", "rsag")], 3: [("tied", "rsag")]}


def main() -> None:
    ranks, directory = sys.argv[1:]
    world, rendezvous = detect_world(os.environ), os.environ["COMMSCHED_RENDEZVOUS"]
    for task, policy in RUNS[int(ranks)]:
        os.environ |= {"COMMSCHED_POLICY": policy, "COMMSCHED_RENDEZVOUS": f"{rendezvous}.{task}"}
        train("commsched", task, f"{directory}/{task}", world.rank, world.world_size)
        commsched.shutdown()


if __name__ == "__main__":
    main()
