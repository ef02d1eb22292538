"""The loops over data in ``docs/elastic.md``, in elastic jobs of real processes that lose a rank: the samples of each step."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from tests import warm
from tests.jobs.elastic_ends import ended, nothing_left
from tests.jobs.job import ROOT, run_job

from .elastic_page_rank import ROWS

RANK = str(ROOT / "tests" / "plugins" / "torch" / "elastic_page_rank.py")
STEPS, BATCH = 10, 16
SAMPLER, FEWER, STATEFUL, ACCELERATE = (
    "def batches_from(number, rank",
    "def batches_from_place",
    "StatefulDataLoader(",
    "Accelerator(cpu",
)

REPLACED = ["-n", "2", "--elastic", "--max-restarts", "2"]
NOT_REPLACED = ["-n", "3", "--elastic", "--min", "2", "--max-restarts", "0"]

#: By step and rank, the samples that it has used for the step that counts.
Used = dict[tuple[int, int], list[int]]


def run(mark: str, directory: Path, options: list[str], *strikes: str) -> Used:
    command = [sys.executable, RANK, mark, str(STEPS), str(directory), *strikes]
    code, out, err = run_job(*options, "--", *command, environ={"CUDA_VISIBLE_DEVICES": ""}, imports=warm.ACCELERATE)
    assert code == 0, err
    ends = ended(out)
    assert len(set(ends.values())) == 1, ends
    assert nothing_left(out)
    said = re.findall(r"^step (\d+) of (\d+) ranks, rank (\d+) pid \d+ uses ([\d ]+)$", out, re.MULTILINE)
    ranks: dict[int, int] = {}  # of the last attempt of each step, as there are ever fewer
    for number, size, _, _ in said:
        ranks[int(number)] = min(ranks.get(int(number), int(size)), int(size))
    assert ranks[STEPS - 1] == len(ends)
    used: Used = {}
    for number, size, rank, rows in said:
        if int(size) == ranks[int(number)]:
            rows = [int(row) for row in rows.split()]
            assert used.setdefault((int(number), int(rank)), rows) == rows  # again, if the step was broken off
    assert sorted(used) == [(number, rank) for number in range(STEPS) for rank in range(ranks[number])]
    return used


def of_sampler(number: int, rank: int) -> list[int]:
    """What the rank uses in the step, of 2 ranks without a loss."""
    sampler = DistributedSampler(range(ROWS), num_replicas=2, rank=rank, drop_last=True)  # type: ignore[arg-type, var-annotated]
    epoch, place = divmod(number, len(sampler) // BATCH)
    sampler.set_epoch(epoch)
    return list(sampler)[BATCH * place : BATCH * (place + 1)]


def epochs_of(used: Used) -> list[list[int]]:
    """The samples of each epoch, step by step: as many full batches as there are for the ranks of each step."""
    epochs: list[list[int]] = [[]]
    for number in range(STEPS):
        own = [rows for (step, _), rows in used.items() if step == number]
        assert [len(rows) for rows in own] == [BATCH] * len(own)
        if ROWS - len(epochs[-1]) < BATCH * len(own):
            epochs.append([])
        epochs[-1] += [row for rows in own for row in rows]
    return epochs


@pytest.mark.parametrize("mark", [SAMPLER, STATEFUL])
def test_ranks_that_are_replaced_take_what_they_take_without_a_loss(mark: str, tmp_path: Path) -> None:
    """A loss in the midst of the first epoch, and one in the first step of the third."""
    if mark == STATEFUL:
        pytest.importorskip("torchdata")
    used = run(mark, tmp_path, REPLACED, "forward:1:2:kill", "forward:0:8:kill")
    assert used == {(number, rank): of_sampler(number, rank) for number in range(STEPS) for rank in range(2)}


@pytest.mark.parametrize(
    ("mark", "options", "strikes", "sizes"),
    [
        (FEWER, REPLACED, ["forward:1:1:kill", "forward:0:4:kill"], {2}),  # the second one in the first step of an epoch
        (FEWER, NOT_REPLACED, ["forward:1:1:kill"], {3, 2}),
        (ACCELERATE, NOT_REPLACED, ["forward:1:1:kill"], {3, 2}),
    ],
    ids=["replaced", "fewer", "accelerate"],
)
def test_no_sample_of_an_epoch_is_used_twice_with_fewer_ranks_either(
    mark: str, options: list[str], strikes: list[str], sizes: set[int], tmp_path: Path
) -> None:
    if mark == ACCELERATE:
        pytest.importorskip("accelerate")
    used = run(mark, tmp_path, options, *strikes)
    assert {sum(step == number for step, _ in used) for number in range(STEPS)} == sizes
    for epoch, rows in enumerate(epochs_of(used)):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert sorted(rows) == sorted(order[: len(rows)])
