"""A rank that is alone and recorded trains as without commsched, and its layers and their times are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import commsched.plugins.torch as cs
from commsched.session.local import local_sessions
from commsched.session.recording import STEPS_TO_RECORD, start_recording


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clips: bool, goes_on: Callable[[int], bool]) -> int:
    """Returns the number of steps, each of which ``goes_on`` has allowed."""
    source, steps = torch.Generator().manual_seed(1), 0
    while goes_on(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=source)).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        steps += 1
    return steps


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("clips", [False, True])
def test_a_recorded_rank_trains_as_ever(clips: bool, tmp_path: Path) -> None:
    model, optimizer = made()
    [session] = local_sessions(1)
    path = tmp_path / "record.json"
    start_recording(session, path)
    ours = cs.ScheduledOptimizer(optimizer, model, session=session)
    steps = train(model, ours, clips, lambda step: step < 100 * STEPS_TO_RECORD and not path.exists())
    session.close()
    plain, optimizer = made()
    train(plain, optimizer, clips, lambda step: step < steps)
    for mine, theirs in zip(model.parameters(), plain.parameters()):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    found = json.loads(path.read_text())
    names = [layer["name"] for layer in found["profile"]["layers"]]
    assert names == ["before forward", *(name for name, _ in model.named_parameters())]
    assert found["measures_norms"] == clips
    assert found["full_wait"] is None
