import math
from collections.abc import Callable, Iterator
from itertools import count
from random import Random

import pytest
from scipy.stats import t

from commsched.tuner import stats as compare_module
from commsched.tuner.stats import MAX_PAIRS, MIN_GAIN, STATED_PAIRS, PairedComparison, compare


def noisy(seconds: float, deviation: float, random: Random) -> Callable[[], float]:
    return lambda: seconds * math.exp(random.gauss(0, deviation))


def test_the_quantiles_are_those_of_student() -> None:
    for table, quantile in ((compare_module._T_SURE, 0.998), (compare_module._T_95, 0.975)):
        assert table == {pairs: pytest.approx(t.ppf(quantile, pairs - 1), abs=1e-3) for pairs in range(4, MAX_PAIRS + 1, 2)}


def test_a_clear_gain_is_seen_after_the_fewest_pairs() -> None:
    found = compare(lambda: 0.4, lambda: 0.3)
    assert found.better
    assert found.pairs == STATED_PAIRS == 4
    assert (found.gain, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert (found.incumbent_seconds, found.winner_seconds) == pytest.approx((0.4, 0.3))


@pytest.mark.parametrize("winner", [0.4, 0.5, 0.4 * (1 - 0.9 * MIN_GAIN)])
def test_what_is_no_faster_is_dropped_after_the_fewest_pairs(winner: float) -> None:
    found = compare(lambda: 0.4, lambda: winner)
    assert not found.better
    assert found.pairs == 4
    assert found.gain == pytest.approx(1 - winner / 0.4, abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "order"),
    [
        ((1.0, 1.0), "ABBABAAB"),  # no better
        ((1.0, 0.5), "ABBABAABABBABAAB"),  # better; how much
        (None, "ABBABAABBAABABBABAABABBA"),  # undecided to the end
    ],
)
def test_the_order_is_that_of_thue_and_morse(seconds: tuple[float, float] | None, order: str) -> None:
    taken: list[str] = []
    random = Random(3)

    def window(which: int) -> Callable[[], float]:
        def measure() -> float:
            taken.append("AB"[which])
            return seconds[which] if seconds is not None else random.uniform(1.0, 2.0) - 0.1 * which

        return measure

    compare(window(0), window(1))
    assert "".join(taken) == order


@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 8])
def test_a_period_of_windows_is_no_gain(period: int) -> None:
    """Half of each period is slow, whatever is measured in it."""
    for phase in range(period):
        windows = (1.3 if number % period < period / 2 else 1.0 for number in count(phase))
        assert not compare(windows.__next__, windows.__next__).better


def test_a_drift_cancels() -> None:
    clock = count()

    def drifting(seconds: float) -> Callable[[], float]:
        return lambda: seconds * 1.05 ** next(clock)

    found = compare(drifting(0.4), drifting(0.4))
    assert found.gain == pytest.approx(0)
    assert not found.better
    clock = count()
    found = compare(drifting(0.4), drifting(0.3))
    assert found.better
    assert found.gain == pytest.approx(0.25)


def test_it_gives_up_when_the_pairs_are_spent() -> None:
    random = Random(3)
    found = compare(noisy(0.4, 0.1, random), noisy(0.38, 0.1, random), 8)
    assert not found.better
    assert found.pairs == 8
    assert found.low < 0.05 < found.high


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="3 pairs are too few to compare; 4 are the least"):
        compare(lambda: 1.0, lambda: 1.0, 3)


def outcomes(gain: float, deviation: float, times: int) -> Iterator[bool]:
    random = Random(7)
    for _ in range(times):
        yield compare(noisy(1.0, deviation, random), noisy(1 - gain, deviation, random)).better


@pytest.mark.parametrize("deviation", [0.005, 0.02, 0.08])
def test_what_is_slower_is_hardly_ever_confirmed(deviation: float) -> None:
    assert sum(outcomes(-0.01, deviation, 500)) <= 5
    assert sum(outcomes(0.0, deviation, 500)) <= 8  # which would cost nothing


@pytest.mark.parametrize(("gain", "deviation"), [(0.02, 0.005), (0.05, 0.02), (0.1, 0.04)])
def test_what_is_faster_by_some_windows_noises_is_confirmed(gain: float, deviation: float) -> None:
    assert sum(outcomes(gain, deviation, 300)) >= 285


def kept(gain: float, deviation: float, times: int) -> list[PairedComparison]:
    random = Random(5)
    found = (compare(noisy(1.0, deviation, random), noisy(1 - gain, deviation, random)) for _ in range(times))
    return [one for one in found if one.better]


@pytest.mark.parametrize(("gain", "deviation"), [(0.01, 0.005), (0.03, 0.02), (0.05, 0.05), (0.1, 0.03), (0.2, 0.02)])
def test_of_what_is_kept_the_interval_holds_the_truth_as_often_as_it_says(gain: float, deviation: float) -> None:
    """Also where a lucky few are kept: what decides is not what is said."""
    found = kept(gain, deviation, 800)
    assert len(found) > 100
    assert 0.92 < sum(one.low <= gain <= one.high for one in found) / len(found) < 0.99
    assert math.isclose(sum(one.gain for one in found) / len(found), gain, rel_tol=0.15)


def test_what_decided_by_luck_and_then_does_no_better_is_not_kept() -> None:
    windows = count()
    found = compare(lambda: 1.0, lambda: 0.8 if next(windows) < 4 else 1.01)
    assert not found.better
    assert found.pairs == STATED_PAIRS
    assert found.gain == pytest.approx(-0.01)
