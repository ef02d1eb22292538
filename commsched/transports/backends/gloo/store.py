"""The store through which the process groups of all ranks find each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from ....core.errors import TransportError


class GatherStore(Store):
    """A PyTorch store that gathers over the control channel, so that no further port is open to strangers.

    A rank's values are sent when the rank asks for a key that it does not have. All ranks must do so equally often. Process
    groups do: each sets its address, then asks for all addresses.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self._gather = gather
        self._own: dict[str, str] = {}
        self._all: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._own[key] = (value.encode() if isinstance(value, str) else value).hex()

    @property
    def published(self) -> bytes:
        """All values that this rank has set, separated by spaces."""
        return b" ".join(bytes.fromhex(value) for value in self._own.values())

    def get(self, key: str) -> bytes:
        """Return the value that a rank has set for ``key``.

        Raises:
            TransportError: no rank had set it when all ranks asked.
            CommschedError: the job failed meanwhile.
        """
        self.wait([key])
        return self._all[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all ``keys`` are there. Raises as ``get`` does. The control channel, not ``timeout``, limits the wait."""
        if all(key in self._all for key in keys):
            return
        for record in self._gather(self._own):
            self._all.update((key, bytes.fromhex(value)) for key, value in record.items())
        missing = [key for key in keys if key not in self._all]
        if missing:
            raise TransportError(f"gloo asks for {missing[0]!r}, which no rank has set: is it the same version everywhere?")
