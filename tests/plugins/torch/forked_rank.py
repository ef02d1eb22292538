"""One rank whose DataLoader forks workers while updates are outstanding: forked_rank.py OUT; saves weights as OUT.<rank>."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import commsched
from commsched.plugins.torch import ScheduledOptimizer

ROWS, BATCHES, EPOCHS = 3, 4, 2


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


class Rows(Dataset[torch.Tensor]):
    """The rows of one rank; ``model``, if given, is what a worker looks at before it returns one."""

    def __init__(self, rank: int, look: Any = None) -> None:
        self._rank, self._look = rank, look

    def __len__(self) -> int:
        return ROWS * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._look is not None:
            self._look()
        generator = torch.Generator().manual_seed(1000 * self._rank + index)
        return torch.randn(4, generator=generator, dtype=torch.float64)


def train(optimizer: Any, model: nn.Module, loaders: list[Any]) -> None:
    for batches in zip(*loaders):
        optimizer.zero_grad()
        model(torch.cat(batches)).square().mean().backward()
        optimizer.step()


def in_a_child(act: Callable[[], object]) -> str:
    """What ``act`` raises in a forked process, which runs the handlers of the interpreter's exit then."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        raised = ""
        try:
            act()
        except commsched.CommschedError as error:
            raised = f"{type(error).__name__}: {error}"
        os.write(writer, raised.encode())
        atexit._run_exitfuncs()
        os._exit(0)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    with os.fdopen(reader) as pipe:
        return pipe.read()


def main() -> None:
    session = commsched.init()
    model, out = mlp(), sys.argv[1]
    optimizer: Any = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    train(optimizer, model, [DataLoader(Rows(session.rank), ROWS)])
    assert in_a_child(lambda: None) == ""
    expected = "ClosedError: a forked process reads parameters whose update is outstanding; call optimizer.synchronize() before"
    assert in_a_child(lambda: model[0].weight.sum()) == expected
    for _ in range(EPOCHS):
        train(optimizer, model, [DataLoader(Rows(session.rank), ROWS, num_workers=2)])
    first = next(iter(DataLoader(Rows(session.rank), ROWS)))
    train(optimizer, model, [[first]])
    optimizer.zero_grad()
    model(first).square().mean().backward()
    expected = "ClosedError: a forked process reads gradients whose averages are outstanding"
    assert in_a_child(lambda: model[2].weight.grad.sum()) == expected
    optimizer.step()
    optimizer.synchronize()
    # Workers that look at the model.
    train(optimizer, model, [DataLoader(Rows(session.rank, lambda: model[0].weight.sum()), ROWS, num_workers=2)])
    persistent: Any = DataLoader(Rows(session.rank), ROWS, num_workers=2, persistent_workers=True)
    for _ in range(EPOCHS):
        train(optimizer, model, [persistent])
    del persistent
    torch.save(model.state_dict(), f"{out}.{session.rank}")


if __name__ == "__main__":
    main()
