"""Reusable memory for partitions, which is never reused while a reference to it exists.

A partition is too large for the allocator to keep. Each would be mapped anew, and its page faults cost more than its sum.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from weakref import ref

import numpy as np
from numpy.typing import NDArray

_Block = NDArray[np.uint8]


class _Lent(ref[NDArray[Any]]):
    """Refers weakly to an array that every memoryview of a lent block keeps alive. (``weakref.finalize`` does the same, at
    several times the cost.)"""

    __slots__ = ("block",)
    block: _Block


class BufferPool:
    """Lends buffers. A buffer returns when the last reference to it, and to every view of it, is gone.

    So a buffer cannot be returned too early, and a buffer that a failure drops is not lost. The pool never holds more memory
    than was lent at once. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Filled wherever a last reference is dropped. That may be anywhere, even inside ``take``, so no lock is taken.
        self._returned: deque[_Block] = deque()
        self._lent: dict[int, _Lent] = {}  # by id: what calls back has to exist. A single operation on a dict is atomic.
        self._free: dict[int, list[_Block]] = {}
        self._free_bytes = self._lent_bytes = self._most_bytes = 0

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` (at least 1) of writable memory, of format ``B``, with undefined content."""
        with self._lock:
            if self._returned:
                self._collect()
            fitting = self._free.get(nbytes)
            if fitting:
                block = fitting.pop()
                self._free_bytes -= nbytes
            else:
                block = np.empty(nbytes, np.uint8)
                self._trim(nbytes)
            self._lent_bytes += nbytes
        array: NDArray[Any] = block.view()
        lent = _Lent(array, self._came_back)
        lent.block = block
        self._lent[id(lent)] = lent
        return array.data

    def _came_back(self, lent: _Lent) -> None:
        del self._lent[id(lent)]
        self._returned.append(lent.block)

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
