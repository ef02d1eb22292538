"""Scripts that set torch's default device or dtype: what the plugin makes by itself has a device and a dtype of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from .loops.loop import Data, batch, mlp, require_plain


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """For the whole process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Words(nn.Module):
    """A sparse gradient besides dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True)
        self.body = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs + self.words(inputs.argmax(dim=1)))


@pytest.mark.parametrize("default", ["device", "dtype"])
def test_defaults_of_the_script_are_not_those_of_the_plugin(default: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        batches = [{rank: batch(rank, step) for rank in data.ranks} for step in range(3)]
        with (
            torch.device("meta") if default == "device" else nullcontext()
        ):  # in place of CUDA: nothing else can use it, either
            second = data.scheduled(torch.optim.SGD(model.body.parameters(), lr=0.1, momentum=0.9), model)
            for each in batches:
                model.zero_grad()
                losses = [model(each[rank]).square().mean() for rank in data.ranks]
                (sum(losses) / len(losses)).backward()
                nn.utils.clip_grad_norm_(model.body.parameters(), 0.1)
                optimizer.step()
                second.step()

    with _default_dtype(torch.float16) if default == "dtype" else nullcontext():
        require_plain(
            loop, model=lambda: Words().double(), optimizer=lambda model: torch.optim.SGD(model.words.parameters(), lr=0.1)
        )
