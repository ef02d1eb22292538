"""Training on CUDA devices over NCCL, one device per rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from commsched.transports.open import detect_capabilities
from tests.jobs.job import run_job

from .test_equality import OPTIMIZERS
from .training import MLP, require_equal, train_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        not detect_capabilities("cuda").nccl or torch.cuda.device_count() < 2, reason="needs two CUDA devices, cupy and NCCL"
    ),
]


@pytest.mark.parametrize("options", [(), ("--policy", "fifo"), ("--collective", "rsag")])
def test_nccl_equals_plain_training(options: tuple[str, ...], tmp_path: Path) -> None:
    ranks = 2
    out = tmp_path / "w"
    command = [sys.executable, "-m", "tests.plugins.torch.cuda_rank", str(out)]
    options = (*options, "--partition", "600", "--credit", "1200", "--transport", "auto")
    code, _, err = run_job("-n", str(ranks), *options, "--", *command)
    assert code == 0, err
    assert ", nccl, " in err
    by_rank = [torch.load(f"{out}.{rank}") for rank in range(ranks)]
    require_equal(by_rank, train_alone(MLP, OPTIMIZERS["AdamW"], ranks), MLP.tolerance)
