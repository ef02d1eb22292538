"""Elastic jobs with Accelerate, in real processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import commsched
from commsched.core.errors import UnsupportedError
from tests import warm
from tests.jobs.job import run_job

STEPS = 8
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def run(directory: Path, options: list[str], *strikes: str, environ: dict[str, str] | None = None) -> tuple[str, str]:
    """What the job prints on stdout and stderr."""
    rank = [sys.executable, "-m", "tests.plugins.accelerate_elastic_rank", str(STEPS), str(directory), *strikes]
    environ = {**NO_GPU, "GLOO_SOCKET_IFNAME": "lo", **(environ or {})}
    code, out, err = run_job(*options, "--", *rank, environ=environ, imports=warm.ACCELERATE)
    assert code == 0, err
    assert "Warning" not in err, err
    return out, err


def ended(out: str) -> dict[int, str]:
    """By rank: its weights, its last loss and its learning rate."""
    return {int(rank): end for rank, end in re.findall(r"^rank (\d) weights (.*)$", out, re.MULTILINE)}


def worlds(out: str) -> list[tuple[int, str]]:
    """The first step of each world of each process, and what it takes for its rank and number of ranks."""
    return sorted((int(step), world) for step, world in re.findall(r"^pid \d+ step (\d+) in (.*)$", out, re.MULTILINE))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The end of two ranks that are not elastic: the process group is Accelerate's own."""
    out, _ = run(tmp_path_factory.mktemp("undisturbed"), ["-n", "2"])
    [end] = set(ended(out).values())
    return end


def test_a_killed_rank_is_replaced_and_the_weights_are_those_of_a_run_without_loss(tmp_path: Path, undisturbed: str) -> None:
    """Once in the midst of an update's batches, with rank 0 lost, and once while the others gather."""
    out, err = run(
        tmp_path, ["-n", "2", "--elastic"], "forward:0:3:kill", "stepped:1:6:kill", environ={"COMMSCHED_TRANSPORT": "gloo"}
    )
    assert ended(out) == {0: undisturbed, 1: undisturbed}, err
    assert re.findall(r"rank (\d) \(pid \d+\) was killed by SIGKILL", err) == ["0", "1"]
    assert {world for _, world in worlds(out)} == {"{(0, 2)} main True", "{(1, 2)} main False"}
    stale = re.findall(r"^stale (.*)$", out, re.MULTILINE)
    assert stale
    assert set(stale) == {
        "this data loader was prepared before ranks were lost or came: where step.is_new_world, prepare another one for the "
        "ranks of now, from the place of step.number on"
    }


def test_with_fewer_ranks_accelerate_has_as_many(tmp_path: Path) -> None:
    options = ["-n", "3", "--elastic", "--min", "2", "--max-restarts", "0"]
    out, err = run(tmp_path, options, "forward:0:3:kill")
    ends = ended(out)
    assert sorted(ends) == [0, 1]
    assert len(set(ends.values())) == 1
    [step] = re.findall(r"the job goes on with 2 ranks instead of 3, from step (\d)\n", err)
    assert worlds(out) == [
        (0, "{(0, 3)} main True"),
        (0, "{(1, 3)} main False"),
        (0, "{(2, 3)} main False"),
        (int(step), "{(0, 2)} main True"),
        (int(step), "{(1, 2)} main False"),
    ]


REFUSED = {
    "Lightning": "Lightning's Trainer cannot be elastic, since it has a loop and a process group of its own",
    "Trainer": "a Trainer of Transformers cannot be elastic, since it has a loop of its own",
    "another accelerator": "an accelerator that exists already cannot follow the ranks of an elastic job: make",
    "an own process group": "torch.distributed was initialised before the session of an elastic job",
    "before the loop": "torch.distributed.barrier, before the loop over Elastic.steps() has begun: a new process",
    "an optimizer without its model": "this optimizer has parameters of a model that was not prepared, so its",
    "two optimizers": "2 optimizers are prepared, and an elastic job can have one: give it all parameters, in groups",
    "a model without an optimizer": "the optimizer lacks parameters of a prepared Linear, and cannot be elastic: freeze",
    "a stream": "in an elastic job a prepared data loader has a dataset with indices, and dispatch_batches=False",
    "dispatched batches": "in an elastic job a prepared data loader has a dataset with indices, and dispatch_batches=False",
    "a group": "torch.distributed.new_group cannot be used in an elastic job: its group would not follow the ranks",
    "a message": "torch.distributed's send has no form in an elastic job; all_gather, all_reduce, broadcast",
    "bits": "torch.distributed.all_reduce with BOR has no form in an elastic job",
    "a scale of the loss": "mixed_precision='fp16' cannot be elastic: the scale of a loss would differ between",
    "the last batch": "this data loader was prepared before ranks were lost or came: where step.is_new_world",
    "half an update": "gradients accumulate over several steps of Elastic, and would be lost with a rank: take all",
}


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    """The lines of both ranks."""
    rank = [sys.executable, "-m", "tests.plugins.accelerate_refused_rank"]
    options = ["-n", "2", "--elastic", "--max-restarts", "0"]
    code, out, err = run_job(*options, "--", *rank, environ=NO_GPU, imports=(*warm.TRANSFORMERS, *warm.LIGHTNING))
    assert code == 0, out + err
    return out.splitlines()


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_elastic_is_refused_by_name(refusals: list[str], what: str) -> None:
    said = [line for line in refusals if line.startswith(f"{what}: ")]
    assert len(said) == 2
    assert all(line.startswith(f"{what}: {REFUSED[what]}") for line in said), said


def test_a_session_that_averages_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher refuses the variable; this is a script that has said ``init(disable=True)``."""
    from commsched.plugins.accelerate import Accelerator

    monkeypatch.setattr(commsched, "is_elastic", lambda: True)
    monkeypatch.setattr(commsched, "init", lambda: SimpleNamespace(disabled=True))
    with pytest.raises(
        UnsupportedError, match="disable=1 in an elastic job: Accelerate's own DistributedDataParallel does not"
    ):
        Accelerator(cpu=True)


def test_nothing_else_is_tried(refusals: list[str]) -> None:
    assert {line.partition(":")[0] for line in refusals} == set(REFUSED)
