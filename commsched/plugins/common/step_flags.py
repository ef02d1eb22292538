"""StepFlags: what ranks say of each step besides gradients, so that no rank diverges unnoticed. Shared by plugins."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

import commsched

from ...core.device import Device
from ...core.device_events import Event
from ...core.errors import RanksDiverged
from ...core.manifest import Manifest, TensorSpec
from ...devices import open_device
from .collectives import register_flat

#: A transport may round the mean of equal digests, as it multiplies the sum or each digest by 1 / ranks, but by less than this.
#: Digests that differ are random numbers of 40 bits, so their mean is further off.
_ROUNDING = 0.5
_VERDICT_SECONDS = 30.0


def digest_of_record(record: Any) -> float:
    """A digest of JSON values. It has 40 bits, so that a float64 holds the sum of the digests of 8192 ranks exactly."""
    text = json.dumps(record, sort_keys=True)
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big"))


def digests_differ(own: float, mean: float) -> bool:
    """Whether ranks have other digests than this one. ``mean`` is the mean of the digests of all ranks."""
    return abs(mean - own) > _ROUNDING


class StepFlags:
    """In each step, a rank offers a record that must be equal on all ranks, and flags whose means over the ranks it gets back.

    Both travel as one tensor in a group of its own, so that no gradient shares a partition with it and waits for it. Its dtype
    is float64, which no wire dtype narrows. The record travels as a digest. If records differ, each rank's digest differs from
    the mean, so every rank notices and sends its record to rank 0 (``Session.compare``), which names the difference.

    Making one is collective. One thread at a time may call ``offer``, any thread the others. ``what`` names the records in
    errors, and is unique in the session; ``count`` is the number of flags.
    """

    def __init__(self, session: commsched.Session, name: str, what: str, count: int = 0) -> None:
        self._session = session
        self._what = what
        self._record: Mapping[str, Any] = {}
        self._own: Sequence[float] = [0.0] * (count + 1)
        spec = TensorSpec(f"commsched.{name}", (count + 1,), "float64")
        self._on_device: _OnDevice | None = None
        if session.device == "cpu":
            self.group, (self._mean,) = register_flat(session, Manifest((spec,)))
        else:
            device = open_device(session.device)
            self._on_device = _OnDevice(device, spec.nbytes)
            self.group = session.register(Manifest((spec,)), {spec.dtype: self._on_device.memory}, device)
            self._mean = self._on_device.values

    @property
    def is_there(self) -> bool:
        """Whether all ranks have made the last offer of this rank."""
        return self.group.proxies[0].is_open

    def offer(self, record: Mapping[str, Any], flags: Sequence[float] = ()) -> None:
        """Offer a ``record`` of JSON values, by the names that an error gives them, and ``flags``. Waits only until the last
        offer is there. Raises as :meth:`wait`."""
        self.group.begin_step()
        self._record = record
        self._own = digest_of_record(record), *flags
        self._mean[:] = self._own
        self.group.notify_ready(0, None if self._on_device is None else self._on_device.to_device(self.group.step))

    def wait(self) -> None:
        """Wait until all ranks have made the last offer of this rank. Raises CommschedError if the session failed or was
        closed."""
        step = self.group.step
        self.group.proxies[0].wait()
        if self._on_device is not None:
            self._on_device.to_host(step)

    def means(self) -> list[float]:
        """The means of the flags over all ranks. Waits for them."""
        self.wait()
        means: list[float] = self._mean[1:].tolist()
        return means

    def differs(self, flag: int) -> bool:
        """Whether the ``flag``, a digest, differs between ranks. Call it when the means are there."""
        return self._differs(1 + flag)

    def require_same(self) -> None:
        """Require equal records of all ranks. Waits for them. Raises RanksDiverged if they differ, or the job's earlier
        failure."""
        self.wait()
        if self._differs(0):
            end_with_difference(self._session, self._what, self.group.step, self._record)

    def _differs(self, index: int) -> bool:
        return digests_differ(self._own[index], float(self._mean[index]))


class _OnDevice:
    """Memory of a device and the ``values`` that are copied to it and back, float64, for transports that average there."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.memory = device.allocate(nbytes)
        self._host = device.allocate_host(nbytes)
        self.values = np.frombuffer(self._host, np.float64)
        self._stream = device.stream()
        self._lock = threading.Lock()
        self._step = -1  # of the last offer
        self._is_there = False  # whether ``values`` are what is in the device's memory

    def to_device(self, step: int) -> Event:
        with self._lock:
            self._step, self._is_there = step, False
            self._stream.copy(self.memory, self._host)
            return self._stream.record()

    def to_host(self, step: int) -> None:
        """Copy the averages of ``step``, which are there, once. After a later offer they are gone."""
        with self._lock:
            if step == self._step and not self._is_there:
                self._stream.copy(self._host, self.memory)
                self._stream.synchronize()
                self._is_there = True


def end_with_difference(session: commsched.Session, what: str, step: int, values: Mapping[str, Any]) -> NoReturn:
    """Report this rank's ``values`` to rank 0 (see ``Session.compare``) and wait for the failure that this causes.

    Call it only if the values are known to differ between ranks: then every rank calls it. Raises RanksDiverged, which names
    the first value that differs, or the job's earlier failure.
    """
    session.core.has_raised = True  # the failure is raised here
    session.compare(what, step, values)
    raise session.await_failure(_VERDICT_SECONDS) or RanksDiverged(
        f"{what} differ between ranks after step {step}: rank {session.rank} has {json.dumps(dict(values))}"
    )
