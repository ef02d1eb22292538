"""Who trains on the same batches is found by the gradients of one step, and nobody else is."""

from __future__ import annotations

import random
from array import array

import pytest

from commsched.core.duplicates import SAMPLED_STEP, Duplicates, GradientSamples
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.norms import NormsOf
from commsched.core.pace import PaceReport
from commsched.core.plan import cut
from commsched.core.task import ALL_REDUCE, CommTask

ADVICE = "give each rank its own part of the data, by a DistributedSampler, say, or by a seed that depends on the rank"


def digest(values: list[float], manifest: Manifest | None = None, partition_bytes: int = 400, backwards: bool = False) -> str:
    manifest = manifest or Manifest((TensorSpec("weight", (len(values),), "float32"),))
    data, samples = memoryview(array("f", values)).cast("B"), GradientSamples()
    partitions = cut(manifest, partition_bytes).partitions
    for at in reversed(partitions) if backwards else partitions:
        samples.add(CommTask(0, SAMPLED_STEP, at, data[at.start : at.stop], ALL_REDUCE), manifest)
    found = samples.take(0)
    assert samples.take(0) == ""
    return found


def gradients(seed: int, count: int = 1000) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(0.0, 1.0) for _ in range(count)]


def test_equal_gradients_have_equal_digests_in_whichever_order_they_travel() -> None:
    assert digest(gradients(1)) == digest(gradients(1), backwards=True) != ""
    assert digest(gradients(1)) != digest(gradients(2)) != ""
    moved = gradients(1)
    moved[:100], moved[100:200] = moved[100:200], moved[:100]  # the same values in other partitions
    assert digest(moved) != digest(gradients(1))


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 1000,
        [1.0] * 1000,
        [float("nan")] * 1000,
        [0.0] * 980 + gradients(1, 20),  # a sparse gradient
        gradients(1, 31),  # a tiny model
    ],
)
def test_gradients_that_ranks_may_share_by_chance_have_none(values: list[float]) -> None:
    assert digest(values) == ""


def test_what_is_no_gradient_has_none() -> None:
    spec = TensorSpec("weight", (1000,), "float32")
    assert digest(gradients(1), Manifest((TensorSpec("commsched.flags", (1000,), "float32"),))) == ""
    assert digest(gradients(1), Manifest((spec,), norms=NormsOf(1, 0, (2.0,)))) == ""
    assert digest(gradients(1), Manifest((spec,))) != ""


def said(digests: list[str], step: int = SAMPLED_STEP + 1) -> tuple[list[str], tuple[int, ...]]:
    duplicates = Duplicates(len(digests))
    lines = [duplicates.add(rank, PaceReport(0, step, 0.1, 0.1, (), each)) for rank, each in reversed(list(enumerate(digests)))]
    again = [duplicates.add(rank, PaceReport(1, step, 0.1, 0.1, (), each)) for rank, each in enumerate(digests)]
    assert not duplicates.ranks or not any(again)  # it is said once
    return [line for line in lines if line is not None], duplicates.ranks


def test_ranks_with_equal_digests_are_named() -> None:
    what = "had the same gradients in step 19, as ranks that train on the same batches have, "
    what += "which learn no more than one rank would;"
    assert said(["a", "a"]) == ([f"all ranks {what} {ADVICE}"], (0, 1))
    assert said(["a", "b", "a", "c"]) == ([f"ranks 0, 2 {what} {ADVICE}"], (0, 2))


def test_nothing_is_said_of_others() -> None:
    assert said(["a", "b"]) == ([], ())
    assert said(["", ""]) == ([], ())
    assert said(["a", "", ""]) == ([], ())
    assert said(["a", "a"], step=SAMPLED_STEP + 11) == ([], ())
