"""Who shares a host, who leads, and whether there is a hierarchy at all."""

import pytest

from commsched.core.errors import ConfigError
from commsched.transports.hierarchy.topology import HostTopology, RankLocation, is_wanted


def seats(*places: tuple[str, int], shares_memory: bool = True) -> list[RankLocation]:
    return [RankLocation(address, local_rank, shares_memory) for address, local_rank in places]


TWO_BY_TWO = seats(("a", 0), ("a", 1), ("b", 0), ("b", 1))


def test_ranks_of_one_address_share_a_host_and_the_lowest_local_rank_leads_but_rank_0_leads_its_own():
    layout = HostTopology.of(seats(("a", 1), ("b", 1), ("a", 0), ("b", 0), ("c", 0)))
    assert layout.hosts == ((0, 2), (3, 1), (4,))
    assert layout.leaders == (0, 3, 4)
    assert [layout.host_of(rank) for rank in range(5)] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("hierarchy", "collective", "places", "wanted"),
    [
        ("auto", "all_reduce", TWO_BY_TWO, True),
        ("auto", "rsag", TWO_BY_TWO, False),
        ("auto", "all_reduce", seats(("a", 0), ("a", 1)), False),
        ("auto", "all_reduce", seats(("a", 0), ("b", 0)), False),
        ("auto", "all_reduce", seats(("a", 0), ("a", 1), ("b", 0)), True),
        ("auto", "all_reduce", seats(("a", 0), ("a", 0), ("b", 0)), False),  # two containers, say
        ("auto", "all_reduce", seats(("a", 0), ("a", 1), ("b", 0), shares_memory=False), False),
        ("on", "all_reduce", seats(("a", 0), ("a", 1)), True),
        ("on", "rsag", TWO_BY_TWO, True),
        ("off", "all_reduce", TWO_BY_TWO, False),
    ],
)
def test_auto_is_on_where_it_gains(hierarchy, collective, places, wanted):
    assert is_wanted(hierarchy, collective, HostTopology.of(places), places) is wanted


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (seats(("a", 0), ("a", 0)), "ranks 0 and 1 of a both say that their local rank is 0"),
        (seats(("a", 1), ("a", 0), ("a", 1)), "ranks 0 and 2 of a both say that their local rank is 1"),
        (seats(("a", 0), ("a", 1), shares_memory=False), "rank 0 runs on a system without memfd_create"),
    ],
)
def test_on_where_it_cannot_be_says_why(places, why):
    with pytest.raises(ConfigError, match=f"hierarchy='on' is not possible: {why}"):
        is_wanted("on", "all_reduce", HostTopology.of(places), places)
