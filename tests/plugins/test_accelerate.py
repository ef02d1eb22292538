"""Accelerate's own library in two processes: what ours trains is what theirs trains with DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.jobs.job import ROOT, clean_environ
from tests.plugins.missing import import_without

#: Small partitions on a slow link, so that what is not waited for is not there.
SLOW = {"TRANSPORT": "ps", "RATE": "10mbit", "PARTITION": "600", "CREDIT": "1200"}

CASES = (
    "as_documented",
    "accumulated_and_clipped",
    "no_sync_by_hand",
    "averaged_each_backward",
    "optimizer_first_in_several_calls",
    "two_models_of_one_optimizer",
    "two_optimizers_of_one_model",
    "overflow_on_one_rank",
    "autocast",
    "resumed",
    "trained_twice",
    "without_a_prepared_optimizer",
    "a_part_without_a_prepared_optimizer",
    "uneven_inputs",
    "compiled",
    "disabled",
)

#: An average is averaged once more, with what came since: not the order of DistributedDataParallel. And theirs adds up the
#: squares of a norm, by which gradients are clipped, in an order that depends on the processor.
ROUNDED = dict.fromkeys(("averaged_each_backward", "accumulated_and_clipped", "without_a_prepared_optimizer"), 1e-6)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank: what ``accelerate_rank.py`` saved. Started by torchrun."""
    out = tmp_path_factory.mktemp("accelerate") / "results"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = warm.run(
        [*launcher, "-m", "tests.plugins.accelerate_rank", str(out)],
        env=clean_environ(
            GLOO_SOCKET_IFNAME="lo",
            CUDA_VISIBLE_DEVICES="",
            **{f"COMMSCHED_{name}": value for name, value in SLOW.items()},
        ),
        imports=warm.ACCELERATE,
        nested=True,
        cwd=ROOT,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert [line for line in warned if "Guards may run slower on Python 3.13.0" not in line] == [], done.stderr  # PyTorch's
    return [torch.load(f"{out}.{rank}") for rank in range(2)]


def require_equal(results: list[dict[str, Any]], case: str, tolerance: float = 0.0, rounded: Collection[str] = ()) -> None:
    """Ours equals theirs, and rank 1's equals rank 0's to the bit. A sum of two has one order only, so that theirs too can be
    equal to the bit; ``tolerance`` is relative to the largest number of a tensor. ``rounded`` are sums of more."""
    for rank in range(2):
        ours, theirs = results[rank][case]["ours"], results[rank][case]["theirs"]
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            tolerated = (1e-6 if name in rounded else tolerance) * float(theirs[name].abs().max())
            assert torch.allclose(value, theirs[name], rtol=0.0, atol=tolerated), (case, rank, name)
            assert torch.equal(value, results[0][case]["ours"][name]), (case, rank, name)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_accelerate(results: list[dict[str, Any]], case: str) -> None:
    require_equal(results, case, ROUNDED.get(case, 0.0))


def test_there_is_no_other_case(results: list[dict[str, Any]]) -> None:
    assert set(results[0]) == {*CASES, "refusals"}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "an optimizer without its model",
            "UnsupportedError: this optimizer has parameters of a model that was not prepared, so its gradients would not be "
            "averaged; give prepare() the model too",
        ),
        (
            "an optimizer that another one has replaced",
            "UnsupportedError: this optimizer does not average gradients any more, since free_memory() was called or another "
            "one with the same parameters was prepared; prepare it again",
        ),
        ("an optimizer that is scheduled already", "ConfigError: give prepare() your own optimizer: it makes a Scheduled"),
        (
            "uneven inputs of a model that is not prepared",
            "UnsupportedError: join_uneven_inputs: a Sequential among the joinables is not prepared",
        ),
        ("a communication hook", "UnsupportedError: DistributedDataParallelKwargs(comm_hook='bf16') is a hook of Distrib"),
        ("another class", "UnsupportedError: the accelerator is a Special, not accelerate.Accelerator"),
        ("FSDP", "UnsupportedError: Accelerate is set to FSDP; only plain data parallelism, on CPUs or CUDA devices, is"),
        ("8-bit floats", "UnsupportedError: mixed_precision=fp8: its kernels would read parameters before their update"),
    ],
)
def test_what_cannot_be_is_refused_by_name(results: list[dict[str, Any]], what: str, message: str) -> None:
    for rank in range(2):
        assert results[rank]["refusals"][what].startswith(message), results[rank]["refusals"][what]


def test_the_scripts_of_its_own_tests_pass() -> None:
    """In one job, since to start one costs more than a script."""
    names = ["test_script", "test_sync", "test_distributed_data_loop"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = warm.run(
        [*launcher, "-m", "tests.plugins.accelerate_scripts_rank", *names],
        env=clean_environ(GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="", ACCELERATE_USE_CPU="true"),
        imports=warm.ACCELERATE,
        nested=True,
        cwd=ROOT,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [f"rank {rank} of 2 has run {name}" for name in names for rank in range(2)]
    assert [line for line in expected if line not in done.stdout] == [], done.stdout


def test_a_missing_package_is_named_with_how_to_install_it(tmp_path: Path) -> None:
    expected = 'ModuleNotFoundError: this plugin needs Hugging Face Accelerate: pip install "commsched[accelerate]"'
    assert expected in import_without("accelerate", tmp_path)
