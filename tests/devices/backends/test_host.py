"""The host as a device: what ``check_device`` cannot see of it."""

from __future__ import annotations

import numpy as np
import pytest

from commsched.core.errors import UnsupportedError
from commsched.devices import open_device


def test_views_are_of_arrays_in_one_piece() -> None:
    host, array = open_device("host"), np.arange(12, dtype=np.float32).reshape(3, 4)
    memory = host.view(array)
    memory[4:8] = memory[8:12]
    assert array[0, 1] == 2
    with pytest.raises(UnsupportedError, match=r"^the memory of a ndarray of shape \(4, 3\) is not in one piece$"):
        host.view(array.T)
    with pytest.raises(UnsupportedError, match=r"^the memory of a list is not to be had in the host: "):
        host.view([1.0])


def test_tensors_of_an_engine_are_viewed_by_dlpack() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2)
    open_device("host").view(tensor)[:4] = np.float32(1.5).tobytes()
    assert tensor.tolist() == [1.5, 0]


def test_a_stream_waits_for_an_event_of_another_device() -> None:
    waited = []

    class Event:
        def synchronize(self) -> None:
            waited.append(self)

        def is_done(self) -> bool:
            return False

    event = Event()
    open_device("host").stream().wait(event)
    assert waited == [event]
