from __future__ import annotations

from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.searchers import make_searcher
from commsched.tuner.space import Space

from .surfaces import SLOW_NETWORK, search


def test_it_asks_for_the_whole_lattice_and_then_for_nothing() -> None:
    space = SLOW_NETWORK.space
    searcher = make_searcher("grid", space)
    asked = search(searcher, SLOW_NETWORK, trials=1000)
    assert sorted(asked, key=str) == sorted(space.lattice(per_octave=1), key=str)
    assert searcher.ask() is None
    assert searcher.best() == min(asked, key=SLOW_NETWORK)


def test_coarse_comes_before_fine() -> None:
    space = Space(SchedulerConfig(), 10**10, frozenset({"credit"}))
    asked = search(make_searcher("grid", space), lambda config: 1.0, trials=1000)
    sizes = [config.partition_bytes // 125_000 for config in asked]
    assert sizes == [32, 16, 4, 128, 2, 8, 64, 256, 1]  # the incumbent, the middle of 1..256, those of its halves, the rest


def test_nine_trials_span_partition_and_credit() -> None:
    space = Space(SchedulerConfig(2_000_000, 16_000_000), 10**10)  # the middle of the lattice
    asked = search(make_searcher("grid", space), lambda config: 1.0, trials=9)
    assert {config.partition_bytes for config in asked} == {500_000, 2_000_000, 16_000_000}
    assert {config.credit_bytes // config.partition_bytes for config in asked} == {2, 8, 32}
