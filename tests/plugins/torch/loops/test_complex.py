"""Complex parameters, as of Fourier neural operators: an average is that of real and imaginary parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import commsched

from .loop import LARGE, SMALL, TIMEOUT_SECONDS, Data, batch, require_plain, run


class Spectral(nn.Module):
    """Real and complex weights in turn, at odd places of their buffer too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.modes = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.more = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.last = nn.Linear(4, 2).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(inputs * self.scale) @ self.modes * self.more
        return self.last(torch.fft.irfft(spectrum, n=4) + self.shift)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, True)], ids=["cut", "merged, ordered"])
def test_complex_parameters_train_as_real_ones(name: str, config: Any, ordered: bool) -> None:
    """Several backward passes, some of them local, and clipping, which looks at what all ranks have made of gradients."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            for part in range(2):
                with data.no_sync(optimizer) if step == 2 and part == 0 else nullcontext():
                    data.loss(model, 10 * step + part).backward()
            if step:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    require_plain(loop, model=Spectral, optimizer=OPTIMIZERS[name], config=config, ordered=ordered)


def test_complex_parameters_that_are_unfrozen_later() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        model.modes.requires_grad_(False)
        wrapped = data.scheduled(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(3):
            model.modes.requires_grad_(step > 0)
            wrapped.zero_grad()
            data.loss(model, step).backward()
            wrapped.step()

    require_plain(loop, model=Spectral)


def test_a_complex_gradient_that_one_rank_has_changed_is_refused_by_its_name() -> None:
    """On both ranks: one has recorded the change, to be made later, and the other has made it at once."""
    both = threading.Barrier(2)
    refusals: list[str] = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.loss(model).backward()
        model.modes.grad.mul_(1j if 0 in data.ranks else 1)
        optimizer.step()
        try:
            model(batch(0))
        except commsched.UnsupportedError as refusal:
            refusals.append(str(refusal))
            both.wait(TIMEOUT_SECONDS)  # else the other rank is told of this rank's end instead
            raise

    with pytest.raises(commsched.UnsupportedError):
        run(loop, model=Spectral)
    named = "the gradient of 'modes' was changed before step() to other values"
    assert [refusal.startswith(named) for refusal in refusals] == [True, True]
