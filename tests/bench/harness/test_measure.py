from math import comb
from statistics import median

import pytest

from bench.harness.measure import (
    beside,
    interval_rank,
    interval_words,
    median_absolute_error,
    median_interval,
    rotated,
    slowest,
)


def test_a_median_and_its_interval():
    samples = [18.0, *map(float, range(17, 0, -1))]
    assert median_interval(samples) == {"median": 9.5, "low": 5.0, "high": 14.0, "count": 18}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_samples_give_their_range(count):
    assert median_interval([float(sample) for sample in range(count)]) == {
        "median": (count - 1) / 2,
        "low": 0.0,
        "high": count - 1.0,
        "count": count,
    }


@pytest.mark.parametrize("count", [*range(6, 40), 100, 1001])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.99])
def test_the_interval_is_the_narrowest_that_has_the_confidence(count, confidence):
    def coverage(rank):
        return 1 - 2 * sum(comb(count, below) for below in range(rank + 1)) / 2**count

    rank = interval_rank(count, confidence)
    assert rank == 0 or coverage(rank) >= confidence
    assert coverage(rank + 1) < confidence
    assert 2 * rank < count


def test_known_ranks():  # tables of the sign test: 95 %, two-sided
    assert [interval_rank(count, 0.95) for count in (6, 8, 9, 10, 20, 30)] == [0, 0, 1, 1, 5, 9]


def test_what_the_interval_is():
    assert interval_words(5) == "range of 5 steps"
    assert interval_words(6) == "95 % interval of the median"


def test_the_median_error_is_absolute_and_a_share():
    assert median_absolute_error([(1.0, 0.9), (2.0, 2.04), (1.0, 1.3)]) == pytest.approx(0.1)


def test_no_samples():
    with pytest.raises(ValueError, match="a median needs samples"):
        median_interval([])


def test_the_slowest_rank_is_that_with_the_greatest_median():
    assert slowest([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0]]) == [2.0, 2.0, 2.0]
    assert median(slowest([[3.0], [1.0]])) == 3.0


def test_every_turn_begins_with_another_system():
    assert [rotated("ABC", turn) for turn in range(4)] == [list("ABC"), list("BCA"), list("CAB"), list("ABC")]


def test_a_step_is_as_long_as_the_slowest_ranks() -> None:
    by_rank = [{"plain": [1.0, 4.0, 2.0], "other": [1.0, 8.0, 1.0]}, {"plain": [2.0, 1.0, 2.0], "other": [3.0, 1.0, 2.0]}]
    row = beside("plain", "other", by_rank)
    assert row == {"milliseconds": 3000.0, "ratio": 1.5, "ratio_low": 1.0, "ratio_high": 2.0}
