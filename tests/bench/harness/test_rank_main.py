"""The parts that run in each rank's process, with threads as ranks: what is wrong must be counted."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench import collectives, rounds
from commsched.session.local import local_sessions


class Corrupting:
    """A transport that damages one element of every average of at least ``least_bytes``, on this rank only."""

    def __init__(self, inner, least_bytes):
        self._inner = inner
        self._least_bytes = least_bytes

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def start(self, task, completion):
        self._inner.start(task, _Damage(completion) if task.nbytes >= self._least_bytes else completion)


class _Damage:
    def __init__(self, completion):
        self.on_sent = completion.on_sent
        self._completion = completion

    def on_done(self, task):
        task.data[-1] ^= 1
        self._completion.on_done(task)


def run_ranks(world_size, benchmark, arguments, wrap_transport=None):
    def rank(session):
        with session:
            return benchmark.rank_main(session, arguments)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, local_sessions(world_size, wrap_transport=wrap_transport)))


COLLECTIVES = {"sizes": [4, 40_000], "repetitions": 3, "warmup": 2, "period": 8191, "server_pids": []}
ROUNDS = {"rounds": 20, "size": 4000, "slow_rank": 1, "periods": [1021, 4093]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_finds_nothing_wrong(world_size):
    for found in run_ranks(world_size, collectives, COLLECTIVES):
        assert [(size["size_bytes"], size["wrong_elements"], len(size["seconds"])) for size in found] == [
            (4, 0, 3),
            (40_000, 0, 3),
        ]
        assert all(seconds > 0 for size in found for seconds in size["seconds"])


def test_collectives_counts_every_wrong_element():
    for found in run_ranks(2, collectives, COLLECTIVES, lambda transport: Corrupting(transport, 40_000)):
        assert [size["wrong_elements"] for size in found] == [0, 5]  # one in each of 3 repetitions and 2 warm-ups


def test_rounds_finds_nothing_wrong():
    assert [found["wrong_rounds"] for found in run_ranks(2, rounds, ROUNDS)] == [0, 0]


def test_rounds_counts_every_wrong_round():
    found = run_ranks(2, rounds, ROUNDS, lambda transport: Corrupting(transport, 4000))
    assert [rank["wrong_rounds"] for rank in found] == [20, 20]
