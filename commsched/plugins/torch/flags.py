"""Flags: what the ranks tell each other of each round beside its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import commsched

from ...core.manifest import TensorSpec
from .device import Device
from .flat import register_flat


@dataclass(frozen=True)
class Used:
    """When backward is over. Shares of the ranks."""

    unfrozen: float  # have a parameter that needs a place in a buffer, or may need it soon
    adding: float  # have run no backward, but wait to add parameters
    share: list[float]  # by flag: have a gradient of it


@dataclass(frozen=True)
class Kept:
    """At the end of the round. Shares of the ranks."""

    committed: float  # called step()
    unfrozen: float
    own_changed: float  # have changed gradients that were their own sums
    share: list[float]  # by flag: have a gradient of it still
    changed: list[float]  # by flag: have something else than what they handed over or its average
    norm: list[float]  # by flag: the mean of the ranks' norms of what they have read or changed; NaN: some have not
    projection: list[float]  # likewise, of the projections of it
    own_norm: Sequence[float]  # by flag: this rank's
    own_projection: Sequence[float]


class Flags:
    """Two sets of floats, averaged over the ranks, with some for each parameter of the optimizer.

    Each set is a group of its own: nothing waits for it by sharing its partition, and both go before all but the first
    gradients.
    """

    def __init__(self, session: commsched.Session, device: Device, parameters: int) -> None:
        self._device = device
        (self._used,), self._used_group = register_flat(
            session, device, [TensorSpec("commsched.used", (2 + parameters,), "float32")]
        )
        (self._kept,), self._kept_group = register_flat(
            session, device, [TensorSpec("commsched.kept", (3 + 4 * parameters,), "float64")]
        )  # float64, which no wire dtype narrows: norms are compared
        self._all_used: Used | None = None  # of this round, once read
        self._all_kept: Kept | None = None
        self._own: tuple[Sequence[float], Sequence[float]] = (), ()  # norms and projections

    def begin_step(self) -> None:
        self._used_group.begin_step()
        self._kept_group.begin_step()

    def release(self) -> None:
        """No round is to come; waits for the end of the last."""
        self.used()
        self.kept()
        self._used_group.release()
        self._kept_group.release()

    def offer_used(self, unfrozen: bool, adding: bool, used: Sequence[bool]) -> None:
        self._all_used = None
        with self._device.aside():
            self._used.copy_(torch.tensor([unfrozen, adding, *used]))
        self._used_group.notify_ready(0)

    def offer_kept(
        self,
        committed: bool,
        unfrozen: bool,
        own_changed: bool,
        kept: Sequence[bool],
        changed: Sequence[bool],
        norm: Sequence[float],
        projection: Sequence[float],
    ) -> None:
        self._all_kept = None
        self._own = norm, projection
        numbers = [committed, unfrozen, own_changed, *kept, *changed, *norm, *projection]
        with self._device.aside():
            self._kept.copy_(torch.tensor(numbers, dtype=torch.float64))
        self._kept_group.notify_ready(0)

    def are_there(self) -> bool:
        return self._used_group.proxies[0].is_open and self._kept_group.proxies[0].is_open

    def used(self) -> Used:
        """Waits until backward is over on all ranks."""
        if self._all_used is None:
            self._used_group.proxies[0].wait()
            with self._device.aside():
                unfrozen, adding, *share = self._used.tolist()
            self._all_used = Used(unfrozen, adding, share)
        return self._all_used

    def kept(self) -> Kept:
        """Waits until the round is over on all ranks."""
        if self._all_kept is None:
            self._kept_group.proxies[0].wait()
            with self._device.aside():
                committed, unfrozen, own_changed, *shares = self._kept.tolist()
            parts = (shares[part * len(shares) // 4 : (part + 1) * len(shares) // 4] for part in range(4))
            share, changed, norm, projection = parts
            self._all_kept = Kept(committed, unfrozen, own_changed, share, changed, norm, projection, *self._own)
        return self._all_kept
