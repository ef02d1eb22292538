"""Activation checkpointing, parametrizations, and parameters that are used more than once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .loops.loop import LARGE, SMALL, Data, batch, require_plain, run, train


class Blocks(nn.Module):
    """A stem and blocks whose activations are computed again in backward: in whole, in part, or nested."""

    def __init__(self, how: str, use_reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))
        self.how = how
        self.use_reentrant = use_reentrant

    def _again(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.how == "sequence":
            return checkpoint_sequential(  # type: ignore[no-any-return]
                nn.Sequential(*self.blocks), 2, x, use_reentrant=self.use_reentrant
            )
        for block in self.blocks:
            if self.how == "nested":
                x = x + self._again(lambda y, block=block: self._again(block, torch.sin(y)), x)  # type: ignore[misc]
            else:
                x = x + self._again(block, x)
        return x


@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("how", "use_reentrant"),
    [("each", True), ("each", False), ("sequence", True), ("sequence", False), ("nested", False)],  # not nested, says torch
)
def test_checkpointed_blocks(how: str, use_reentrant: bool, config: Any) -> None:
    require_plain(train, model=lambda: Blocks(how, use_reentrant).double(), config=config)


def test_checkpointed_blocks_and_a_part_without() -> None:
    """The checkpointed ones read their parameters in backward too, when gradients of others are on their way."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(lambda x: model(x) + model.blocks[0](x), step).backward()
            optimizer.step()

    require_plain(loop, model=lambda: Blocks("each", False).double())


def _weight_norm() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2)).double()


def _spectral_norm() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 2)).double()


def _orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)).double()


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def _symmetric() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("make", [_weight_norm, _spectral_norm, _orthogonal, _symmetric], ids=lambda make: make.__name__)
def test_parametrizations(make: Callable[[], nn.Module]) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            # One forward, as each of them counts for the spectral norm.
            model(torch.cat([batch(rank, step) for rank in data.ranks])).square().mean().backward()
            optimizer.step()

    require_plain(loop, model=make)


def test_a_parametrization_is_removed_in_training() -> None:
    """The layer has a new parameter then, which no optimizer knows; the others are trained on."""

    def loop(data: Data, model: Any, optimizer: Any) -> torch.Tensor:
        train(data, model, optimizer, 2)
        parametrize.remove_parametrizations(model[0], "weight")
        train(data, model, optimizer, 1, 2)
        return model[0].weight.detach()  # type: ignore[no-any-return]

    require_plain(loop, model=_weight_norm)


class Twice(nn.Module):
    """One module used twice, tied weights, and a weight that is used as a transpose too."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.inner, self.decode = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().T.contiguous())
        self.again = nn.Linear(4, 6)
        self.again.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(torch.tanh(self.inner(torch.tanh(self.encode(x) + self.again(x)))))
        return self.decode(y) + y @ self.encode.weight


@pytest.mark.parametrize("config", [SMALL, LARGE], ids=["small", "large"])
def test_modules_used_twice_and_tied_weights(config: Any) -> None:
    require_plain(train, model=lambda: Twice().double(), config=config)


def test_a_block_used_several_times_with_reentrant_checkpoints_is_advised_another_way(caplog: pytest.LogCaptureFixture) -> None:
    """``no_sync()`` would not help within one backward."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(2):
            optimizer.zero_grad()
            x = model.stem(batch(data.ranks[0], step))
            for _ in range(3):
                x = model._again(model.blocks[0], x)
            x.square().mean().backward()
            optimizer.step()

    with caplog.at_level(logging.INFO, "commsched"):
        run(loop, model=lambda: Blocks("each", True).double())
        run(loop, model=lambda: Blocks("each", False).double())
    said = [record.getMessage() for record in caplog.records if "accumulate" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("used several times in a forward, checkpoint(..., use_reentrant=False) would save it")
