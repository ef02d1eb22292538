"""One rank of ``python -m bench demo``: a convolutional network on scikit-learn's digits."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import commsched
import commsched.plugins.torch as cs

from .harness.layer_times import LayerTimer

BATCH = 128  # per rank
TEST_IMAGES = 360
BLOCK_STEPS = 10  # steps with one policy before the other takes its turn
SETTLING_STEPS = 2  # of each block, not counted
LEAST_BLOCKS = 3  # after the choice of partition and credit: one that is not counted, and one of each policy
TELL_STEPS = 30  # between two lines on the progress


def make_model() -> nn.Module:
    """Six convolutions, five of them of 600 kB each: gradients and work are spread evenly, as in large networks."""
    layers: list[nn.Module] = [nn.Conv2d(1, 128, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128, affine=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 10))


class Digits:
    """The digits, shuffled and divided among ranks in the same way on every rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
        labels = torch.tensor(digits.target)
        self._generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(labels), generator=self._generator)
        train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
        self._images, self._labels = images[train], labels[train]
        self.test_images, self.test_labels = images[test], labels[test]
        self._mine = slice(rank * BATCH, (rank + 1) * BATCH)
        self._rows = ranks * BATCH

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(len(self._labels), (self._rows,), generator=self._generator)[self._mine]
        return self._images[rows], self._labels[rows]


def measure_layers(steps: int) -> dict[str, Any]:
    """Layer times and step time without communication, while the other ranks compute at the same time."""
    model, data = make_model(), Digits(0, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    timer = LayerTimer(model)
    began = []
    for _ in range(steps):
        began.append(perf_counter())
        images, labels = data.batch()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        forward_ended = perf_counter()
        loss.backward()
        backward_ended = perf_counter()
        optimizer.step()
        timer.step(forward_ended, backward_ended, perf_counter())
    warm_up = steps // 4
    step_seconds = median(b - a for a, b in pairwise(began[warm_up:]))
    return {**asdict(timer.result(warm_up)), "step_seconds": step_seconds}


def is_last_chance(step: int, steps: int) -> bool:
    """Whether the turns must begin at ``step``, the first of a block, since they should be half of the training, and since a
    later beginning would leave too few blocks."""
    return step >= steps // 2 or step + (1 + LEAST_BLOCKS) * BLOCK_STEPS > steps


def counted_steps(policies: Sequence[str], first: int) -> list[int]:
    """The steps whose times count, given the policy of each step. The turns began with step ``first``."""
    steps = range(first + BLOCK_STEPS, len(policies))
    # The next step counts too: its forward ends this step's wait.
    return [step for step in steps if len(set(policies[step - SETTLING_STEPS : step + 2])) == 1]


def train(steps: int) -> dict[str, Any]:
    """Train until partition and credit are chosen, and then to the end with alternating policies. Returns step times by policy,
    the accuracy, and whether the weights are equal on all ranks."""
    session = commsched.init()
    model, data = make_model(), Digits(session.rank, session.world_size)
    optimizer = cs.ScheduledOptimizer(torch.optim.Adam(model.parameters(), lr=1e-3), model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    first = None  # the first step of the first turn
    policies, began = [], []
    for step in range(steps + 1):
        began.append(perf_counter())
        if session.rank == 0 and 0 < step < steps and step % TELL_STEPS == 0:
            left = (began[-1] - began[0]) / step * (steps - step)
            print(f"   step {step} of {steps}; about {left:.0f} s left", flush=True)
        if step == steps:
            break
        if step % BLOCK_STEPS == 0:
            if first is None and (session.gather(session.is_settled)[0] or is_last_chance(step, steps)):
                session.stop_tuner()
                first = step
            if first is not None and session.rank == 0:
                policy = ("fifo", "priority")[(step - first) // BLOCK_STEPS % 2]
                session.reconfigure(replace(session.core.next_config, policy=policy))
        images, labels = data.batch()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
        policies.append(session.core.config.policy)
    times = [after - before for before, after in pairwise(began)]
    counted = [] if first is None else counted_steps(policies, first)
    seconds = {policy: [times[step] for step in counted if policies[step] == policy] for policy in ("fifo", "priority")}
    model.eval()
    with torch.inference_mode():
        accuracy = (model(data.test_images).argmax(1) == data.test_labels).double().mean().item()
    weights = [parameter.double().sum().item() for parameter in model.parameters()]
    return {"seconds": seconds, "accuracy": accuracy, "equal": len(set(map(str, session.gather(weights)))) == 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["measure", "train"])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    result = measure_layers(args.steps) if args.what == "measure" else train(args.steps)
    if os.environ.get("COMMSCHED_RANK", "0") == "0":
        args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
