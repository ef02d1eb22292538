"""The Trainer of Transformers in two processes: what ours trains is what theirs trains with DistributedDataParallel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.jobs.job import run_job
from tests.plugins.missing import import_without

from .test_accelerate import require_equal

CASES = ("as_documented", "accumulated", "mixed_precision", "resumed", "trained_twice")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank: what ``transformers_rank.py`` saved. Started by ``commsched run``."""
    out = tmp_path_factory.mktemp("transformers") / "results"
    environ = {
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(out.parent),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    small = ("--partition", "6000", "--credit", "12000")
    command = ["-n", "2", *small, "--", sys.executable, "-m", "tests.plugins.transformers_rank", str(out)]
    code, _, err = run_job(*command, environ=environ, imports=warm.TRANSFORMERS)
    assert code == 0, err
    assert ".py:" not in err, err  # where a Python warning would say its place
    return [torch.load(f"{out}.{rank}") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_trainer_to_the_bit(results: list[dict[str, Any]], case: str) -> None:
    require_equal(results, case, rounded=["norms"])  # theirs adds up squares in an order that depends on the processor


def test_there_is_no_other_case(results: list[dict[str, Any]]) -> None:
    assert set(results[0]) == {*CASES, "refusals"}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "a batch size to be found",
            "UnsupportedError: auto_find_batch_size: a rank that alone runs out of memory would begin",
        ),
        (
            "processes that Accelerate does not see",
            "UnsupportedError: Accelerate takes this for process 0 of 1, but it is rank {rank} of 2, so data would not be "
            "shared out. Without GPUs, say Accelerator(cpu=True) or TrainingArguments(use_cpu=True); and start with torchrun, ",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(results: list[dict[str, Any]], what: str, message: str) -> None:
    for rank in range(2):
        said = results[rank]["refusals"][what]
        assert said.startswith(message.format(rank=rank)), said


def test_a_missing_package_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    expected = 'ModuleNotFoundError: this plugin needs Hugging Face Transformers: pip install "commsched[transformers]"'
    assert expected in import_without("transformers", tmp_path)
