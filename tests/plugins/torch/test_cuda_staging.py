"""Training on CUDA devices over transports that average in the host's memory. Ranks may share a device."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.jobs.job import run_job

from .test_equality import OPTIMIZERS
from .training import MLP, require_equal, train_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("cupy") is None, reason="needs a CUDA device and cupy"),
]


@pytest.mark.parametrize("transport", ["ps", "gloo"])
@pytest.mark.parametrize("options", [(), ("--policy", "fifo")], ids=["priority", "fifo"])
def test_staging_equals_plain_training(transport: str, options: tuple[str, ...], tmp_path: Path) -> None:
    ranks = 2
    out = tmp_path / "w"
    command = [sys.executable, "-m", "tests.plugins.torch.cuda_rank", str(out)]
    options = (*options, "--partition", "600", "--credit", "1200", "--transport", transport)
    code, _, err = run_job("-n", str(ranks), *options, "--", *command)
    assert code == 0, err
    by_rank = [torch.load(f"{out}.{rank}") for rank in range(ranks)]
    require_equal(by_rank, train_alone(MLP, OPTIMIZERS["AdamW"], ranks), MLP.tolerance)
