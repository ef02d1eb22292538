"""Processes that a rank forks, as DataLoader does: they neither read what is outstanding nor end the job."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tests import warm
from tests.jobs.job import run_job

from .forked_rank import EPOCHS, ROWS, Rows, mlp, train
from .loops.loop import require_close


def test_workers_of_data_loaders(tmp_path: Path) -> None:
    out = tmp_path / "w"
    code, _, err = run_job(
        "-n", "2", "--", sys.executable, "-m", "tests.plugins.torch.forked_rank", str(out), imports=warm.TORCH
    )
    assert code == 0, err
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaders = [DataLoader(Rows(rank), ROWS) for rank in range(2)]
    for _ in range(1 + EPOCHS):
        train(optimizer, model, loaders)
    firsts = [[next(iter(loader))] for loader in loaders]
    for _ in range(2):
        train(optimizer, model, firsts)
    for _ in range(1 + EPOCHS):
        train(optimizer, model, loaders)
    for rank in range(2):
        require_close(torch.load(f"{out}.{rank}"), dict(model.state_dict()))
