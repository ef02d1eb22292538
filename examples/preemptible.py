"""Training that may be interrupted: told by SIGTERM, all ranks stop after the same step, and the next start goes on there.

    commsched run -n 2 -- python examples/preemptible.py --checkpoint runs/digits.pt

Slurm and Kubernetes send SIGTERM before they end a job. ``examples/slurm/train.sbatch`` starts this script. The weights at the
end are those of a run without interruption, bit for bit. Exit code 75: interrupted; start it again.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

told_to_stop: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: told_to_stop.append(number))  # before the imports, which may take seconds

import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402

import commsched  # noqa: E402
import commsched.plugins.torch as cs  # noqa: E402  # line 1

INTERRUPTED = 75


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FILE", help="in a directory that all ranks can read")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ask-every", type=int, default=10, metavar="STEPS", help="steps between two looks for a SIGTERM")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="after each step, to make it last")
    args = parser.parse_args()

    session = commsched.init()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = cs.ScheduledOptimizer(optimizer, model)  # line 2
    first = 0
    if args.checkpoint.exists():  # on all ranks
        saved = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    if session.rank == 0:
        print(f"{session.world_size} ranks begin at step {first}", flush=True)

    for step in range(first, args.steps):
        drawn = torch.randint(0, 1437, (64,), generator=torch.Generator().manual_seed(step))
        mine = drawn[session.rank :: session.world_size]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        time.sleep(args.pause)
        # One rank that was told is enough. All ranks ask after the same steps, so all stop after the same step.
        if (step + 1) % args.ask_every == 0 and step + 1 < args.steps and any(session.gather(told_to_stop)):
            if session.rank == 0:
                save(args.checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1})
                print(f"interrupted after step {step + 1}", flush=True)
            commsched.shutdown()  # all ranks leave in good order, so that the exit code is no failure of the job
            return INTERRUPTED

    if session.rank == 0:
        weights = sum(float(parameter.detach().double().sum()) for parameter in model.parameters())
        print(f"done after step {args.steps}, sum of weights {weights!r}", flush=True)
    return 0


def save(path: Path, what: object) -> None:
    """A reader never finds half of it."""
    draft = path.with_suffix(".draft")
    torch.save(what, draft)
    os.replace(draft, path)


if __name__ == "__main__":
    sys.exit(main())
