"""The order in which sums of a host go to the network."""

from hypothesis import given
from hypothesis import strategies as st

from commsched.transports.hierarchy.launch_queue import LaunchQueue


def taken(launches: LaunchQueue[int]) -> list[int]:
    items = []
    while (item := launches.next()) is not None:
        items.append(item)
    return items


def test_without_an_order_the_smallest_goes_first_and_equals_as_they_came():
    launches: LaunchQueue[int] = LaunchQueue(ordered=False, channels=1)
    for key, order in enumerate((3, 1, 3, 0)):
        launches.expect(key, 0)
        launches.add(key, order, key)
    assert taken(launches) == [3, 1, 0, 2]


@given(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.data())
def test_with_an_order_each_channel_keeps_that_of_the_starts(channels, data):
    launches: LaunchQueue[int] = LaunchQueue(ordered=True, channels=2)
    for key, channel in enumerate(channels):
        launches.expect(key, channel)
    launched = []
    for key in data.draw(st.permutations(range(len(channels)))):
        launches.add(key, -key, key)
        launched += taken(launches)
    for channel in (0, 1):
        assert [key for key in launched if channels[key] == channel] == [k for k, c in enumerate(channels) if c == channel]


def test_what_is_behind_one_that_has_not_come_waits():
    launches: LaunchQueue[int] = LaunchQueue(ordered=True, channels=1)
    launches.expect(1, 0)
    launches.expect(2, 0)
    launches.add(2, 0, 2)
    assert launches.next() is None
    launches.add(1, 0, 1)
    assert taken(launches) == [1, 2]
