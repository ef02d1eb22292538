"""Reusable memory for partitions, which is never reused while a reference to it exists.

A partition is too large for the allocator to keep. Each would be mapped anew, and its page faults cost more than its sum.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Block = NDArray[np.uint8]


class BufferPool:
    """Lends buffers. A buffer returns when the last reference to it, and to every view of it, is gone.

    So a buffer cannot be returned too early, and a buffer that a failure drops is not lost. The pool never holds more memory
    than was lent at once. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Filled wherever a last reference is dropped. That may be anywhere, even inside ``take``, so no lock is taken.
        self._returned: deque[_Block] = deque()
        self._free: dict[int, list[_Block]] = {}
        self._free_bytes = self._lent_bytes = self._most_bytes = 0

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` (at least 1) of writable memory, of format ``B``, with undefined content."""
        with self._lock:
            self._collect()
            fitting = self._free.get(nbytes)
            if fitting:
                block = fitting.pop()
                self._free_bytes -= nbytes
            else:
                block = np.empty(nbytes, np.uint8)
                self._trim(nbytes)
            self._lent_bytes += nbytes
        lent: NDArray[Any] = block.view()  # every memoryview of it keeps it alive
        weakref.finalize(lent, self._returned.append, block).atexit = False
        return lent.data

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free.setdefault(block.nbytes, []).append(block)
            self._free_bytes += block.nbytes
            self._lent_bytes -= block.nbytes

    def _trim(self, more_bytes: int) -> None:
        """Make room for ``more_bytes``: drop free blocks, whose sizes may not be requested any more after a new plan."""
        self._most_bytes = max(self._most_bytes, self._lent_bytes + more_bytes)
        for size in list(self._free):
            blocks = self._free[size]
            while blocks and self._lent_bytes + more_bytes + self._free_bytes > self._most_bytes:
                blocks.pop()
                self._free_bytes -= size
            if not blocks:
                del self._free[size]

    def __repr__(self) -> str:
        return f"<BufferPool {self._lent_bytes} B lent, {self._free_bytes} B free, at most {self._most_bytes} B>"
