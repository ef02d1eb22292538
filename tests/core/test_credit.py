import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsched.core.scheduler import CreditWindow


@given(st.integers(1, 100), st.lists(st.integers(1, 150), max_size=40), st.data())
def test_never_more_than_the_limit_unless_alone(limit: int, sizes: list[int], data: st.DataObject) -> None:
    window, in_flight = CreditWindow(limit), list[int]()
    for nbytes in sizes:
        while not window.admits(nbytes):
            window.give_back(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
        window.take(nbytes)
        in_flight.append(nbytes)
        assert window.in_flight == sum(in_flight)
        assert window.in_flight <= limit or len(in_flight) == 1


def test_one_task_is_admitted_when_nothing_is_in_flight() -> None:
    window = CreditWindow(10)
    assert window.admits(1000)
    window.take(1000)
    assert not window.admits(1)


def test_exactly_the_limit_is_admitted() -> None:
    window = CreditWindow(10)
    window.take(4)
    assert window.admits(6)
    assert not window.admits(7)


def test_a_smaller_limit_revokes_nothing() -> None:
    window = CreditWindow(10)
    window.take(8)
    window.limit = 4
    assert window.in_flight == 8
    assert not window.admits(1)
    window.give_back(8)
    assert window.admits(4)


def test_more_coming_back_than_was_taken_is_our_bug() -> None:
    window = CreditWindow(10)
    window.take(4)
    with pytest.raises(AssertionError, match="5 bytes of credit came back, but only 4 are in flight"):
        window.give_back(5)
    assert window.in_flight == 4


def test_repr_shows_what_is_in_flight() -> None:
    window = CreditWindow(10)
    window.take(4)
    assert repr(window) == "<CreditWindow 4/10 B>"
