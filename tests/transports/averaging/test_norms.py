"""The sums that whoever makes averages adds up for norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from commsched.core.errors import CommschedError, ProtocolError
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec
from commsched.core.norms import ROW_DTYPE, NormsOf
from commsched.core.plan import cut
from commsched.transports.averaging.aggregator import Aggregator
from commsched.transports.averaging.contributions import PartitionKey
from commsched.transports.averaging.norms import NormSums, Scratch, larger, power_sums
from commsched.transports.backend import Contributors

FLOATS = sorted(set(ITEMSIZE) - {"uint8"})


def elements(dtype: str, values: Sequence[float] | NDArray[np.float64]) -> bytes:
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return np.asarray(values, dtype).tobytes()


def rows_of(
    manifest: Manifest, orders: tuple[float, ...] = (2.0,), first_step: int = 0, rows: int = 1, group: int = 0
) -> Manifest:
    norms = NormsOf(group, first_step, orders)
    width = norms.row_elements(len(manifest.tensors))
    return Manifest(tuple(TensorSpec(f"row{row}", (width,), ROW_DTYPE) for row in range(rows)), norms=norms)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 100, 8192, 2**18, 300_001])
def test_sums_of_powers(dtype: str, size: int) -> None:
    values = np.random.default_rng(size).integers(-15, 16, size).astype(np.float64)  # exact in every dtype
    sums = power_sums(elements(dtype, values), dtype, (2.0, math.inf, 1.0, 0.5), Scratch())
    assert sums[:3] == [float(np.sum(values**2)), float(np.max(np.abs(values))), float(np.sum(np.abs(values)))]
    assert sums[3] == pytest.approx(float(np.sum(np.abs(values) ** 0.5)), rel=1e-12)


def test_squares_of_float32_are_added_in_64_bits() -> None:
    values = np.full(100_000, np.float32(1e-30))
    values[0] = np.float32(1e30)
    assert power_sums(values.tobytes(), "float32", (2.0,), Scratch()) == [
        pytest.approx(float(np.float32(1e30)) ** 2, rel=1e-15)
    ]
    assert power_sums(values[1:].tobytes(), "float32", (2.0,), Scratch()) == [
        pytest.approx(99_999e-60, rel=1e-6)
    ]  # 0 in 32 bits


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2**18, 299_999])
def test_what_is_not_finite_stays(dtype: str, bad: float, place: int) -> None:
    values = np.ones(300_000)
    values[place] = bad
    for result in power_sums(elements(dtype, values), dtype, (2.0, math.inf, 1.0, 3.0), Scratch()):
        assert math.isnan(result) if math.isnan(bad) else result == math.inf


def test_the_larger_of_two() -> None:
    assert [larger(1.0, 2.0), larger(2.0, 1.0), larger(0.0, 0.0), larger(1.0, math.inf)] == [2.0, 2.0, 0.0, math.inf]
    assert all(math.isnan(larger(a, b)) for a, b in ((math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(FLOATS)), min_size=1, max_size=8),
    partition_bytes=st.integers(1, 200),
    chance=st.randoms(use_true_random=False),
)
def test_any_cut_in_any_order_gives_the_same_bits(sizes, partition_bytes, chance) -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{n}", (size,), dtype) for n, (size, dtype) in enumerate(sizes)))
    values = [np.asarray([chance.choice((0.1, -0.3, 1e3, 7.0)) for _ in range(spec.numel)]) for spec in manifest.tensors]
    buffers = {
        dtype: b"".join(elements(dtype, each) for each, spec in zip(values, manifest.tensors) if spec.dtype == dtype)
        for dtype in manifest.buffer_bytes
    }
    partitions = list(cut(manifest, partition_bytes).partitions)
    rows = []
    for _ in range(2):
        sums = NormSums(manifest, rows_of(manifest, (2.0, math.inf)))
        chance.shuffle(partitions)
        for at in partitions:
            sums.add(0, at.dtype, at.start, buffers[at.dtype][at.start : at.stop])
        rows.append(sums.take_row(0))
    assert rows[0].tobytes() == rows[1].tobytes()
    step, counts, squares, largest = rows[0][0], *rows[0][1:].reshape(3, -1)
    assert (step, counts.tolist()) == (0, [spec.numel for spec in manifest.tensors])
    for tensor, spec in enumerate(manifest.tensors):
        start = manifest.offset(tensor)
        alone = buffers.get(spec.dtype, b"")[start : start + spec.nbytes]
        whole = power_sums(alone, spec.dtype, (2.0, math.inf), Scratch()) if alone else [0.0, 0.0]
        assert [squares[tensor], largest[tensor]] == [pytest.approx(whole[0], rel=1e-14), whole[1]]


def test_a_row_holds_its_own_step_only() -> None:
    manifest = Manifest((TensorSpec("x", (4,), "float32"), TensorSpec("y", (2,), "float32")))
    sums = NormSums(manifest, rows_of(manifest, first_step=3))
    for step, value in ((2, 100.0), (3, 1.0), (4, 2.0)):
        sums.add(step, "float32", 8, elements("float32", [value] * 4))
    assert sums.take_row(3).tolist() == [3, 2, 2, 2.0, 2.0]
    assert sums.take_row(3).tolist() == [3, 0, 0, 0, 0]  # it began anew
    assert sums.take_row(4).tolist() == [4, 2, 2, 8.0, 8.0]
    sums.add(5, "float32", 0, elements("float32", [1.0]))
    assert sums.take_row(6).tolist() == [6, 0, 0, 0, 0]
    assert sums.take_row(5).tolist() == [5, 0, 0, 0, 0]  # dropped: the step is over


@pytest.mark.parametrize("spec", [TensorSpec("row", (4,), ROW_DTYPE), TensorSpec("row", (5,), "float32")])
def test_rows_of_another_size_are_refused(spec: TensorSpec) -> None:
    manifest = Manifest((TensorSpec("x", (4,), "float32"), TensorSpec("y", (2,), "float32")))
    with pytest.raises(
        ProtocolError, match=r"does not hold rows of 5 numbers, as norms of order 2 of group 0 from step 0 on need"
    ):
        NormSums(manifest, Manifest((spec,), norms=NormsOf(0, 0, (2.0,))))


class World:
    """An aggregator with a group, and the group of its norms, announced by two ranks."""

    def __init__(self) -> None:
        self.manifest = Manifest((TensorSpec("x", (6,), "float32"),))
        self.failures: list[CommschedError] = []
        self.aggregator = Aggregator(Contributors.all_ranks(2), self.failures.append)
        self.rows = rows_of(self.manifest, rows=2)
        self.replies: list[list[float]] = []
        for rank in range(2):
            self.aggregator.add_group(rank, 0, self.manifest)
            self.aggregator.add_group(rank, 1, self.rows)

    def push(self, rank: int, group: int, step: int, partition: int, start: int, stop: int, value: float = 1.0) -> None:
        dtype = "float64" if group else "float32"
        payload = np.full((stop - start) // ITEMSIZE[dtype], value, dtype).tobytes()
        reply = lambda result: self.replies.append(np.frombuffer(result, dtype).tolist())  # noqa: E731
        self.aggregator.push(rank, PartitionKey(group, step, partition), dtype, start, stop, payload, reply)


def test_a_push_of_every_rank_is_answered_by_the_row() -> None:
    world = World()
    for step in range(2):
        for rank in range(2):
            world.push(rank, 0, step, 1, 8, 24, value=step + 2.0 + rank)  # the other partition is at another server
        world.replies.clear()
        world.push(1, 1, step, 1, 24, 48)
        assert world.replies == []
        world.push(0, 1, step, 1, 24, 48)
        assert world.replies == [[step, 4, 4 * (step + 2.5) ** 2]] * 2


def test_a_server_without_averages_of_the_group_answers_too() -> None:
    world = World()
    for rank in range(2):
        world.push(rank, 1, 0, 0, 0, 24)
    assert world.replies == [[0, 0, 0]] * 2


def test_half_a_row_is_refused() -> None:
    world = World()
    world.push(0, 1, 0, 0, 0, 16)
    with pytest.raises(ProtocolError, match="16 bytes of group 1 were pushed; a row of its norms has 24"):
        world.push(1, 1, 0, 0, 0, 16)


def test_norms_of_an_unknown_group_are_refused() -> None:
    aggregator = Aggregator(Contributors.all_ranks(2), pytest.fail)
    with pytest.raises(ProtocolError, match="rank 1 asks for norms of group 0 without announcing the group"):
        aggregator.add_group(1, 1, rows_of(Manifest((TensorSpec("x", (6,), "float32"),))))
