"""Which part of a partition is whose."""

from hypothesis import given
from hypothesis import strategies as st

from commsched.transports.collective.chunks import chunks_of


@given(st.integers(0, 50), st.sampled_from([1, 2, 4, 8]), st.integers(1, 9))
def test_chunks_cover_the_partition_once_on_element_borders(numel: int, itemsize: int, world_size: int) -> None:
    data = memoryview(bytes(index % 251 for index in range(numel * itemsize)))
    chunks = chunks_of(data, itemsize, world_size)
    assert len(chunks) == world_size
    assert b"".join(chunks) == data
    sizes = [len(chunk) for chunk in chunks]
    assert all(size % itemsize == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= itemsize


def test_chunks_are_views() -> None:
    data = bytearray(6)
    chunks_of(memoryview(data), 2, 3)[1][:] = b"ab"
    assert data == b"\0\0ab\0\0"
