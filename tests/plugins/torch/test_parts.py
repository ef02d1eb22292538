"""Where a compiled graph is split into parts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from commsched.plugins.torch.parts import beginnings


def sizes_of(nbytes: list[int], begins: list[int]) -> list[int]:
    return [sum(nbytes[first:last]) for first, last in pairwise([0, *begins, len(nbytes)])]


def test_equal_layers() -> None:
    """The first and the last part are half as large."""
    assert sizes_of([1] * 16, beginnings([1] * 16, [1] * 16, 4)) == [2, 4, 4, 4, 2]


def test_layers_larger_than_half_a_part_are_parts() -> None:
    assert beginnings([3] * 6, [1] * 6, 4) == [1, 2, 3, 4, 5]


def test_a_model_no_larger_than_a_part_is_one() -> None:
    assert beginnings([1] * 4, [1] * 4, 4) == []


def test_borders_are_where_few_values_cross() -> None:
    """Blocks of two layers, between which two values cross."""
    blocks = 8
    assert beginnings([1, 2] * blocks, [1, 2] * blocks, 4) == [2, 4, 6, 8, 10, 12, 14]


def test_an_operation_without_parameters_belongs_to_those_before_it() -> None:
    """As it is done with the result of the layer, it can be compiled into one loop with that."""
    assert beginnings([2, 0, 2, 0, 2, 0], [1] * 6, 2) == [2, 4]


def test_no_part_begins_where_none_can() -> None:
    assert beginnings([2, 2, 2, 2], [None, 1, None, 1], 2) == [1, 3]
    assert beginnings([2, 2, 2, 2], [None] * 4, 2) == []


def test_a_large_parameter_is_a_part_with_little_else() -> None:
    assert beginnings([100, 1, 1, 1, 1], [1] * 5, 2) == [1, 2, 4]
    assert beginnings([1, 1, 1, 1, 100], [1] * 5, 2) == [2, 4]


GRAPHS = st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 5)), max_size=40)


@given(GRAPHS, st.integers(1, 60))
def test_every_part_has_parameters_and_begins_where_it_can(graph: list[tuple[int, int | None]], part_bytes: int) -> None:
    nbytes, crossing = [each[0] for each in graph], [each[1] for each in graph]
    begins = beginnings(nbytes, crossing, part_bytes)
    assert begins == sorted(set(begins))
    assert all(begin > 0 and crossing[begin] is not None for begin in begins)
    assert not begins or all(sizes_of(nbytes, begins))


@given(st.integers(2, 200), st.integers(2, 20))
def test_the_number_of_parts_of_a_model_of_equal_layers(layers: int, parts: int) -> None:
    begins = beginnings([100] * layers, [1] * layers, 100 * layers // parts)
    assert min(layers, parts) // 2 < len(begins) + 1 <= 2 * (parts + 1)
