"""Gradient scaling with skipped steps, and autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commsched.core.finite import LASTING_STEPS

from .loop import Data, alone, batch, mlp, require_close, require_plain, run

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "fused Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),  # unscales by itself
}


def small_mlp() -> nn.Module:
    return mlp().float()


@pytest.mark.parametrize(
    ("overflow", "clip"),
    [("nowhere", False), ("nowhere", True), ("on rank 1", False), ("on rank 1", True), ("everywhere", False)],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_scaled_and_overflow_steps_skipped_by_all(name: str, overflow: str, clip: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(5):

            def loss_of_rank(rank: int, step: int = step) -> torch.Tensor:
                loss = model(batch(rank, step)).square().mean()
                spoilt = step == 2 and (overflow == "everywhere" or (overflow == "on rank 1" and rank == 1))
                return loss * float("inf") if spoilt else loss

            optimizer.zero_grad()
            scaler.scale(data.mean(loss_of_rank)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == ([1024, 2048, 2048, 4096, 4096] if overflow == "nowhere" else [1024, 2048, 1024, 1024, 2048])
        return scaler.state_dict()

    require_plain(loop, optimizer=OPTIMIZERS[name])


def test_a_scale_that_is_too_large_at_first() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=3e38, backoff_factor=1e-34)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(100 * data.loss(model, step, torch.float32)).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    require_plain(loop, model=small_mlp, tolerance=1e-4)


def test_a_loss_that_is_nan_on_one_rank_is_told_and_trained_with(caplog: pytest.LogCaptureFixture) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        def loss_of_rank(rank: int, step: int) -> torch.Tensor:
            loss = model(batch(rank, step)).square().mean()
            return loss * float("nan") if (rank, step) == (1, 2) else loss

        weights = []
        for step in range(3 + LASTING_STEPS):
            optimizer.zero_grad()
            data.mean(lambda rank, step=step: loss_of_rank(rank, step)).backward()  # type: ignore[misc]
            optimizer.step()
            weights.append([parameter.detach().clone() for parameter in model.parameters()])
        return weights[:2], [parameter.isnan() for parameter in weights[-1]]

    expected = alone(loop)
    assert all(is_nan.all() for is_nan in expected[1])
    for result in run(loop):
        require_close(result, expected)
    [line] = [message for message in caplog.messages if "finite" in message]
    assert line.startswith("rank 1 has had gradients that are not finite (NaN or infinite) in every step since step 2, ")
    assert ", rank 0 since step 3; training goes on" in line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        def autocast(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                outputs = model(x)
            assert outputs.dtype == dtype
            return outputs.float()

        for step in range(4):
            optimizer.zero_grad()
            data.loss(autocast, step, torch.float32).backward()
            optimizer.step()

    require_plain(loop, model=small_mlp, tolerance=0.02)


def test_the_whole_loop_within_autocast() -> None:
    """Updates too then happen there, and must not be made in 16 bits. Casts of weights are kept until autocast is left."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            for step in range(4):
                optimizer.zero_grad()
                data.loss(lambda x: model(x).float(), step, torch.float32).backward()
                optimizer.step()

    require_plain(loop, model=small_mlp, tolerance=0.02)


def test_parameters_of_float16_whose_gradients_are_small() -> None:
    """The average of 16-bit gradients is summed in 32 bits."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            (data.loss(model, step, torch.float16) * 1e-3).backward()
            optimizer.step()

    require_plain(loop, model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).half(), tolerance=0.01)
