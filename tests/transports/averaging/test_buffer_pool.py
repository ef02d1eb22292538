"""Memory that is used again: never while somebody refers to it, and never more than was lent at once."""

import gc
import threading
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from commsched.testing.world import run_world
from commsched.transports.averaging.buffer_pool import BufferPool


def address(buffer: memoryview) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def test_memory_comes_back_with_the_last_view_of_it():
    pool = BufferPool()
    buffer = pool.take(1000)
    first = address(buffer)
    array = np.frombuffer(buffer.toreadonly()[100:], np.float32)[5:]
    del buffer
    assert address(pool.take(1000)) != first
    del array
    assert address(pool.take(1000)) == first


def test_it_is_writable_and_of_the_size_wanted():
    buffer = BufferPool().take(7)
    assert (buffer.nbytes, buffer.format, buffer.readonly) == (7, "B", False)


def test_sizes_that_are_not_wanted_any_more_give_way():
    pool = BufferPool()
    held = [pool.take(1000) for _ in range(8)]
    held.clear()
    for _ in range(5):
        held = [pool.take(500) for _ in range(6)]
        held.clear()
    assert repr(pool) == "<BufferPool 3000 B lent, 5000 B free, at most 8000 B>"
    held = [pool.take(500) for _ in range(16)]
    assert repr(pool) == "<BufferPool 8000 B lent, 0 B free, at most 8000 B>"


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 9)), max_size=60))
def test_what_is_lent_is_never_shared_and_never_more_than_lent_at_once(steps):
    pool, lent, most = BufferPool(), [], 0
    for size, take, which in steps:
        if take or not lent:
            lent.append(pool.take(100 * size))
            most = max(most, sum(buffer.nbytes for buffer in lent))
        else:
            lent.pop(which % len(lent))
        spans = sorted((address(buffer), address(buffer) + buffer.nbytes) for buffer in lent)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    pool._collect()
    assert pool._lent_bytes == sum(buffer.nbytes for buffer in lent)
    assert pool._lent_bytes + pool._free_bytes <= max(most, pool._most_bytes) == most


def test_threads_never_share_a_buffer():
    pool = BufferPool()
    started = threading.Barrier(3)

    def body(rank: int) -> int:
        started.wait(60)
        wrong = 0
        for number in range(2000):
            buffers = [pool.take(256) for _ in range(number % 3 + 1)]
            for buffer in buffers:
                buffer[:] = bytes([rank]) * 256
            wrong += sum(buffer != bytes([rank]) * 256 for buffer in buffers)
        return wrong

    assert run_world(3, body) == [0, 0, 0]


def test_a_buffer_dropped_in_a_cycle_comes_back_too():
    pool = BufferPool()
    cycle = [pool.take(64)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    pool._collect()
    assert pool._lent_bytes == 0
