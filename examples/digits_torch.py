"""A small network on scikit-learn's handwritten digits, in PyTorch, data-parallel.

    commsched run -n 2 -- python examples/digits_torch.py

The two lines of commsched are marked; without them it is plain PyTorch.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import commsched
import commsched.plugins.torch as cs  # line 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters to FILE, an .npz")
    args = parser.parse_args()

    session = commsched.init()  # for the rank; the plugin would do it by itself
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.get_default_dtype()), torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = cs.ScheduledOptimizer(optimizer, model)  # line 2
    for _ in range(args.steps):
        mine = torch.randint(0, 1437, (64,))[
            session.rank :: session.world_size
        ]  # all draw the same; the last 360 are for testing
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
    with torch.no_grad():
        right = float((model(images[1437:]).argmax(1) == labels[1437:]).double().mean())
    if session.rank == 0:
        print(f"{session.world_size} ranks, {args.steps} steps, test accuracy {right:.1%}", flush=True)
        if args.save:
            np.savez(args.save, **{name: value.numpy() for name, value in model.state_dict().items()})


if __name__ == "__main__":
    main()
