from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commsched.core.least import Least


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3))))
def test_it_is_the_least_of_numbers_that_grow(keys: int, steps: list[tuple[int, int]]) -> None:
    numbers, least = dict.fromkeys(range(keys), -1), Least(range(keys), -1)
    for key, more in steps:
        key %= keys
        numbers[key] += more
        least.raise_to(key, numbers[key])
        assert least.least == min(numbers.values())
        assert least[key] == numbers[key]


def test_numbers_that_grow_together_are_seldom_looked_at(monkeypatch) -> None:
    least, looked = Least(range(1000), 0), 0

    class Counting(dict[int, int]):
        def values(self):  # type: ignore[no-untyped-def]
            nonlocal looked
            looked += 1
            return super().values()

    monkeypatch.setattr(least, "_numbers", Counting(least._numbers))
    for step in range(1, 4):
        for key in range(1000):
            least.raise_to(key, step)
    assert least.least == 3
    assert looked == 6  # twice for each step
