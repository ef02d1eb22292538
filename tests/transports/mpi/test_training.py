"""PyTorch training in ranks under mpiexec equals plain training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.plugins.torch.rank import TASKS
from tests.plugins.torch.test_equality import OPTIMIZERS
from tests.plugins.torch.training import require_equal, train_alone

from .launch import MPICH, run
from .training_rank import RUNS

SMALL = {"COMMSCHED_PARTITION": "600", "COMMSCHED_CREDIT": "1200"}


RANKS = 3


@pytest.mark.timeout(120)
def test_training_equals_plain_training(tmp_path: Path) -> None:
    command = ["-m", "tests.transports.mpi.training_rank", str(tmp_path)]
    code, _, err = run(MPICH, RANKS, *command, **SMALL, timeout_seconds=100)
    assert code == 0, err
    for task, _ in RUNS:
        by_rank = [torch.load(tmp_path / f"{task}.{rank}") for rank in range(RANKS)]
        require_equal(by_rank, train_alone(TASKS[task], OPTIMIZERS["SGD nesterov"], RANKS), TASKS[task].tolerance)
