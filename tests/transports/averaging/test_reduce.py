"""Averages: exact in the wide type, rounded once, in rank order."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from commsched.core.manifest import ITEMSIZE
from commsched.transports.averaging.reduce import average, total
from commsched.transports.averaging.reduce import widen as widen_bytes


def averaged(contributions: list[bytes], dtype: str) -> bytes:
    out = bytearray(len(contributions[0]))
    average(contributions, dtype, memoryview(out))
    return bytes(out)


def widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def stacks(dtype: type, elements: st.SearchStrategy | None = None) -> st.SearchStrategy[np.ndarray]:
    """1 to 5 ranks with 1 to 40 elements each."""
    return st_numpy.arrays(dtype, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=elements)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(data=st.data())
def test_native_floats_are_summed_in_rank_order_in_their_own_type(dtype, data):
    stack = data.draw(stacks(np.dtype(dtype).type))
    total = stack[0].copy()
    with np.errstate(all="ignore"):
        for row in stack[1:]:
            total = total + row
        expected = total / total.dtype.type(len(stack)) if len(stack) > 1 else total
    got = np.frombuffer(averaged([row.tobytes() for row in stack], dtype), dtype)
    np.testing.assert_array_equal(got, expected)


@given(stacks(np.float16))
def test_float16_is_summed_in_float32_and_rounded_once(stack):
    total = stack[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for row in stack[1:]:
            total = total + row.astype(np.float32)
        expected = (total / np.float32(len(stack))).astype(np.float16)
    got = np.frombuffer(averaged([row.tobytes() for row in stack], "float16"), np.float16)
    np.testing.assert_array_equal(got, expected)


@given(stacks(np.uint16))
def test_bfloat16_equals_torch(stack):
    torch = pytest.importorskip("torch")
    rows = [torch.from_numpy(row.view(np.int16)).view(torch.bfloat16) for row in stack]
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    expected = (total / len(rows)).to(torch.bfloat16) if len(rows) > 1 else rows[0]
    got = torch.frombuffer(bytearray(averaged([row.tobytes() for row in stack], "bfloat16")), dtype=torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@given(stacks(np.uint16))
def test_bfloat16_is_the_nearest_and_even_at_ties(stack):
    total = widen(stack[0])
    with np.errstate(all="ignore"):
        for row in stack[1:]:
            total = total + widen(row)
        exact = (total / np.float32(len(stack))).astype(np.float64)
    got = np.frombuffer(averaged([row.tobytes() for row in stack], "bfloat16"), np.uint16)
    for bits, value in zip(got, exact):
        chosen = float(widen(np.array([bits]))[0])
        assert np.isnan(chosen) == np.isnan(value)
        if not np.isfinite(value) or not np.isfinite(chosen):
            continue
        for neighbour in (int(bits) - 1, int(bits) + 1):
            if 0 <= neighbour < 2**16 and np.isfinite(other := float(widen(np.array([neighbour], np.uint16))[0])):
                distance, others = abs(chosen - value), abs(other - value)
                assert distance < others or (distance == others and bits % 2 == 0) or chosen == other


def test_bfloat16_keeps_nan_even_where_rounding_would_carry_into_infinity_or_zero():
    nans = np.array([0x7F81, 0xFF81, 0x7FFF, 0xFFFF], np.uint16)
    got = np.frombuffer(averaged([nans.tobytes(), np.zeros(4, np.uint16).tobytes()], "bfloat16"), np.uint16)
    assert np.isnan(widen(got)).all()


@given(stacks(np.uint8))
def test_bytes_are_summed_and_not_divided(stack):
    assert averaged([row.tobytes() for row in stack], "uint8") == stack.sum(axis=0, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_one_contribution_comes_back_bit_for_bit(dtype):
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8).tobytes()
    assert averaged([data], dtype) == data


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("numel", [2**16 - 1, 2**16, 2**16 + 1])
def test_wide_sums_cover_every_block(dtype, numel):
    one, three = {"float16": (0x3C00, 0x4200), "bfloat16": (0x3F80, 0x4040)}[dtype]
    ones, threes = (np.full(numel, bits, np.uint16).tobytes() for bits in (one, three))
    two = {"float16": 0x4000, "bfloat16": 0x4000}[dtype]
    assert averaged([ones, threes], dtype) == np.full(numel, two, np.uint16).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_infinities_and_overflow_are_results_and_no_warnings(dtype):
    largest = np.finfo(dtype).max
    rows = [np.array([np.inf, np.inf, largest], dtype), np.array([-np.inf, 1, largest], dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = np.frombuffer(averaged([row.tobytes() for row in rows], dtype), dtype)
    assert np.isnan(got[0])
    assert np.isinf(got[1])
    assert got[2] == (largest if dtype == "float16" else np.inf)  # float16 is summed in a type that holds twice its largest


def test_sums_run_in_the_order_of_ranks():
    rows = [np.array([value], np.float32).tobytes() for value in (1e8, 1.0, -1e8, 3.0)]
    assert np.frombuffer(averaged(rows, "float32"), np.float32)[0] == 0.75  # the 1 is lost beside 1e8
    assert np.frombuffer(averaged([rows[i] for i in (0, 2, 1, 3)], "float32"), np.float32)[0] == 1.0


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", list(ITEMSIZE))
def test_the_average_may_be_made_in_the_first_or_second_contribution(dtype, ranks, place):
    random = np.random.default_rng(ranks)
    nbytes = 150_000 * ITEMSIZE[dtype]  # longer than a block of 16-bit types
    contributions = [bytearray(random.integers(0, 60, nbytes, np.uint8).tobytes()) for _ in range(ranks)]
    expected = averaged([bytes(each) for each in contributions], dtype)
    average(contributions, dtype, contributions[place])
    assert contributions[place] == expected


@pytest.mark.parametrize("dtype", [dtype for dtype in ITEMSIZE if dtype != "uint8"])
@pytest.mark.parametrize("split", [(1, 3), (2, 2), (3, 1)])
def test_averages_of_sums_divided_by_the_number_of_ranks_are_those_of_all_ranks(dtype, split):
    """As hosts of different sizes make them; small integers, so that every order of summing gives the same bits."""
    wide = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
    rows = [np.arange(70_000) % 13 + 4 * rank for rank in range(4)]
    stored = [to_bytes(row, dtype) for row in rows]
    sums = []
    for members in (stored[: split[0]], stored[split[0] :]):
        sums.append(bytearray(rows[0].size * ITEMSIZE[wide]))
        total(members, dtype, sums[-1])
    out = bytearray(len(sums[0]))
    average(sums, wide, out, 4)
    assert np.frombuffer(out, wide).tolist() == (np.sum(rows, axis=0) / 4).tolist()


def to_bytes(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_is_exact(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    out = np.empty(2**16, np.float32)
    widen_bytes(bits.data, dtype, out.data)
    expected = bits.view(np.float16).astype(np.float32) if dtype == "float16" else widen(bits)
    np.testing.assert_array_equal(out, expected)


def test_a_single_contribution_is_divided_if_it_is_a_sum():
    out = bytearray(8)
    average([np.array([6.0, 9.0], np.float32).tobytes()], "float32", out, 3)
    assert np.frombuffer(out, np.float32).tolist() == [2.0, 3.0]
