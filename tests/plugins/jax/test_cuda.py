"""Training on CUDA devices over transports that average in the host's memory. Ranks share the first GPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.job import run_job

jax = pytest.importorskip("jax")
pytest.importorskip("optax")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(jax.default_backend() != "gpu" or find_spec("cupy") is None, reason="needs JAX for CUDA, and cupy"),
]


@pytest.mark.parametrize("name", ["adamw", "clip"])
def test_training_equals_training_alone(name: str, tmp_path: Path) -> None:
    train_and_compare(name, tmp_path)


def train_and_compare(name: str, tmp_path: Path) -> None:
    """Two processes over the parameter server, and one with the joint batch."""
    from .cuda_rank import OPTIMIZERS, STEPS
    from .training import require_close, train_alone

    out = tmp_path / "params"
    sizes = ("--partition", "100", "--credit", "200", "--transport", "ps")
    command = [sys.executable, "-m", "tests.plugins.jax.cuda_rank", name, str(out)]
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "COMMSCHED_CHECK_WEIGHTS": "1"}
    code, _, err = run_job("-n", "2", *sizes, "--", *command, environ=environ)
    assert code == 0, err
    by_rank = []
    for rank in range(2):
        with np.load(f"{out}.{rank}.npz") as saved:
            by_rank.append([saved[f"arr_{index}"] for index in range(len(saved.files))])
    require_close(by_rank, jax.tree.leaves(train_alone(OPTIMIZERS[name], 2, STEPS)), 1e-6)
