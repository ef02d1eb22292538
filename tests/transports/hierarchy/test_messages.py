"""Messages between the ranks of a host, and the memory that they share."""

import fcntl
import os
import tempfile

import pytest

from commsched.core.errors import ProtocolError
from commsched.core.manifest import ITEMSIZE, Manifest, TensorSpec
from commsched.transports.hierarchy import messages

MANIFEST = Manifest(tuple(TensorSpec(f"{dtype}-{i}", (1000,), dtype) for i in range(2) for dtype in ITEMSIZE))


def test_what_one_writes_the_other_reads_and_no_buffer_overlaps_another():
    mirror, fd = messages.create_buffers(MANIFEST, 0)
    other = messages.SharedBuffers(MANIFEST, messages.attach(fd))
    os.close(fd)
    for number, (dtype, nbytes) in enumerate(MANIFEST.buffer_bytes.items()):
        mirror.part(dtype, 0, nbytes)[:] = bytes([number]) * nbytes
    for number, (dtype, nbytes) in enumerate(MANIFEST.buffer_bytes.items()):
        part = other.part(dtype, 0, nbytes)
        assert part == bytes([number]) * nbytes
        assert part.readonly
    assert mirror.part("float64", 8, 24) == bytes([list(ITEMSIZE).index("float64")]) * 16


def test_memory_that_could_shrink_or_is_none_is_refused():
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, 100)
    with pytest.raises(ProtocolError, match="shared memory that may shrink"):
        messages.attach(loose)
    fcntl.fcntl(loose, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert len(messages.attach(loose)) == 100
    os.close(loose)
    with tempfile.TemporaryFile() as file, pytest.raises(ProtocolError, match="no shared memory"):
        messages.attach(file.fileno())


def test_memory_of_another_size_is_refused():
    _, fd = messages.create_buffers(MANIFEST, 0)
    smaller = Manifest((TensorSpec("x", (1,), "float32"),))
    with pytest.raises(ProtocolError, match="bytes of memory for a group that needs 4096"):
        messages.SharedBuffers(smaller, messages.attach(fd))
    os.close(fd)


def test_a_manifest_of_any_length_is_passed():
    manifest = Manifest(tuple(TensorSpec(f"layer {i} " + "x" * 300, (i,), "bfloat16") for i in range(2000)))
    fd = messages.write_manifest(manifest, 5)
    assert messages.read_manifest(fd) == manifest
    os.close(fd)


def test_what_is_no_manifest_is_refused():
    fd = os.memfd_create("text", os.MFD_ALLOW_SEALING)
    os.write(fd, b"[1")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ProtocolError, match="not a manifest"):
        messages.read_manifest(fd)
    os.close(fd)
