"""What ranks must have equal is compared in the order of each rank's reports, whichever rank is ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.comparison import MAX_WAITING, Comparison, first_difference, require_same
from commsched.core.errors import ConfigError, RanksDiverged


def test_equal_values_pass_in_any_order_of_ranks() -> None:
    comparison = Comparison(3)
    for step in (1, 2):
        comparison.add(2, "weights", step, {"a": step, "b": [1.5, None]})
    for rank in (0, 1):
        for step in (1, 2):
            comparison.add(rank, "weights", step, {"b": [1.5, None], "a": step})


@given(st.permutations([0, 1, 2]))
def test_the_first_difference_names_the_value_and_all_ranks(order: list[int]) -> None:
    comparison = Comparison(3)
    values = {0: {"a": 1, "b": 2, "c": 3}, 1: {"a": 1, "b": 5, "c": 6}, 2: {"a": 1, "b": 2, "c": 3}}
    comparison.add(order[0], "weights", 7, values[order[0]])
    comparison.add(order[1], "weights", 7, values[order[1]])
    with pytest.raises(RanksDiverged) as raised:
        comparison.add(order[2], "weights", 7, values[order[2]])
    said = "weights differ between ranks after step 7: 'b' is 2 on ranks 0, 2 but 5 on rank 1 (1 more differ)"
    assert str(raised.value) == said


def test_the_error_ends_with_the_hint_to_another_cause() -> None:
    comparison = Comparison(2)
    comparison.add(0, "weights", 1, {"a": 1}, "look there")
    with pytest.raises(RanksDiverged, match=r"^weights differ .* is 1 on rank 0 but 2 on rank 1; look there$"):
        comparison.add(1, "weights", 1, {"a": 2}, "look there")


def test_nothing_is_kept_of_what_all_have_reported() -> None:
    """A job may make an optimizer for each of very many models."""
    comparison = Comparison(2)
    for what in ("weights", "weights of optimizer 2"):
        for rank in range(2):
            comparison.add(rank, what, 1, {"a": 1})
    assert not comparison._waiting


def test_different_things_are_compared_apart() -> None:
    comparison = Comparison(2)
    comparison.add(0, "weights", 1, {"a": 1})
    comparison.add(1, "rates", 4, {"lr": 2})
    comparison.add(1, "weights", 1, {"a": 1})
    with pytest.raises(RanksDiverged, match=r"^rates differ between ranks after step 4: 'lr' is 3 on rank 0 but 2 on rank 1$"):
        comparison.add(0, "rates", 4, {"lr": 3})


def test_other_steps_and_other_names_are_named() -> None:
    comparison = Comparison(2)
    comparison.add(0, "weights", 1, {"a": 1})
    with pytest.raises(RanksDiverged, match=r"^weights are compared after step 1 on rank 0 but after step 2 on rank 1$"):
        comparison.add(1, "weights", 2, {"a": 1})
    comparison.add(1, "weights", 3, {"a": 1, "b": 1})
    with pytest.raises(RanksDiverged, match=r"^weights after step 3: rank 1 has 'b' but rank 0 does not$"):
        comparison.add(0, "weights", 3, {"a": 1})


def test_a_rank_that_never_compares_is_named_and_memory_is_bounded() -> None:
    comparison = Comparison(3)
    comparison.add(2, "weights", 0, {})
    for step in range(MAX_WAITING):
        comparison.add(1, "weights", step, {})
    with pytest.raises(RanksDiverged, match=rf"^rank 0 compared no weights while rank 1 did so {MAX_WAITING} times$"):
        comparison.add(1, "weights", MAX_WAITING, {})


def test_not_a_number_equals_itself_and_signed_zeros_differ() -> None:
    comparison = Comparison(2)
    comparison.add(0, "weights", 1, {"a": float("nan")})
    comparison.add(1, "weights", 1, {"a": float("nan")})
    comparison.add(0, "weights", 2, {"a": 0.0})
    with pytest.raises(RanksDiverged, match=r"'a' is 0.0 on rank 0 but -0.0 on rank 1"):
        comparison.add(1, "weights", 2, {"a": -0.0})


def test_equal_records_of_any_kind_have_no_difference() -> None:
    for record in (3, None, "text", [1, [2, 3]], {"a": 1, "b": None}):
        assert first_difference([record] * 3) is None


def test_the_first_difference_is_that_of_the_first_rank_in_the_order_of_rank_0() -> None:
    assert first_difference([{"b": 1, "a": 2}, {"b": 1, "a": 2}, {"a": 3, "b": 4, "c": 5}]) == (2, "b", 1, 4)
    assert first_difference([{"b": 1}, {"b": 1, "c": 5}]) == (1, "c", None, 5)
    assert first_difference([[7, 8], [7, 9, 9], [0, 0]]) == (1, 1, 8, 9)
    assert first_difference([[7, 8], [7]]) == (1, 1, 8, None)
    assert first_difference(["one", "one", "two"]) == (2, 0, "one", "two")


def test_what_is_required_to_be_the_same_raises_what_is_made_of_the_first_difference() -> None:
    require_same([[1], [1]], lambda different: "never")
    with pytest.raises(ConfigError, match=r"^'x' is <5> on rank 0 but <7> on rank 1$"):
        require_same(
            [{"x": 5}, {"x": 7}],
            lambda different: f"'{different.key}' is {different.text(lambda item: f'<{item}>')}",
            ConfigError,
        )
