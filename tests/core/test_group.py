"""What may be registered: anything else would be averaged in a copy, or not as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from commsched.core.group import require_buffer, require_buffers
from commsched.core.manifest import Manifest, TensorSpec

MANIFEST = Manifest((TensorSpec("a", (4,), "float32"), TensorSpec("b", (3,), "float64"), TensorSpec("c", (2,), "float32")))


def test_writable_bytes_of_the_right_size_are_taken() -> None:
    require_buffers(MANIFEST, {"float32": memoryview(bytearray(24)), "float64": np.zeros(3).view(np.uint8).data}, "cpu")
    require_buffers(Manifest((TensorSpec("empty", (0,), "float32"),)), {"float32": memoryview(bytearray())}, "cpu")
    require_buffers(MANIFEST, {"float32": np.zeros(24, np.uint8), "float64": np.zeros(24, np.uint8)}, "cuda:0")  # as if there


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({"float32": memoryview(bytearray(24))}, "no buffer was given for float64, of 24 bytes"),
        (
            {"float32": memoryview(bytearray(20)), "float64": memoryview(bytearray(24))},
            "the buffer for float32 has 20 bytes; its tensors have 24",
        ),
        (
            {"float32": memoryview(bytearray(24)), "float64": memoryview(bytes(24))},
            "the buffer for float64 is not writable",
        ),
    ],
)
def test_buffers_that_do_not_fit_are_named(buffers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        require_buffers(MANIFEST, buffers, "cpu")


@pytest.mark.parametrize(
    ("buffer", "device", "message"),
    [
        (bytearray(4), "cpu", "it is a bytearray; give a memoryview of its bytes"),
        (np.zeros(4, np.uint8), "cpu", "it is a ndarray; give a memoryview of its bytes"),
        (np.zeros(4, np.float32).data, "cpu", "it is not a flat view of bytes (format 'f', shape (4,), contiguous); give"),
        (np.zeros((2, 2), np.uint8).data, "cpu", "it is not a flat view of bytes (format 'B', shape (2, 2), contiguous); give"),
        (
            np.zeros(8, np.uint8)[::2].data,
            "cpu",
            "it is not a flat view of bytes (format 'B', shape (4,), not contiguous); give",
        ),
        (memoryview(bytearray(4)), "cuda:0", "it is in the host's memory, not on cuda:0; transport=ps takes it there"),
    ],
)
def test_what_is_no_buffer_is_told_why(buffer: Any, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^it is") as raised:
        require_buffer(buffer, "it", device)
    assert str(raised.value).startswith(message)
