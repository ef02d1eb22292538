from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from .world import leftover_threads


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert leftover_threads(before) == []
