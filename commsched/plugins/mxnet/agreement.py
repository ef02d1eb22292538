"""The record that ranks exchange in each round besides gradients, so that no rank diverges unnoticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import commsched

from ...core.errors import RanksDiverged, UnsupportedError
from ...core.manifest import Manifest, TensorSpec
from ..common.difference import end_with_difference


@dataclass
class RoundOutcome:
    """The actions of a rank before a round began."""

    ends: bool = False  # the rank has ended: this is not a round, and no round follows
    updates: int = 0  # calls of update()
    loaded: int = 0  # sum of the digests of all states that load_states() has read
    numbers: Mapping[str, Any] = field(default_factory=dict)  # numbers of the optimizer at the last update, as JSON

    def to_record(self) -> dict[str, Any]:
        """Return all values that must be equal on all ranks, by the name that an error gives them."""
        return {"calls of update()": self.updates, "what load_states() has read": self.loaded, **self.numbers}


class Agreement:
    """A group with one tensor that says what each rank has done. The tensor is averaged over the ranks in each round.

    It is a separate group, so that no gradient shares a partition with it and waits for it. Its dtype is float64, which no wire
    dtype narrows. The tensor holds a digest of the rank's :class:`RoundOutcome`, and the average of equal digests is exact.
    It also holds, for each rank, whether the rank has ended, and for each parameter, whether there is a new gradient
    and whether the parameter is frozen.

    Args:
        what: names the optimizer in errors. Unique in the session.
        names: names of the parameters.
    """

    def __init__(self, session: commsched.Session, what: str, names: Sequence[str]) -> None:
        self._session = session
        self._what = what
        self._names = names
        self._done = RoundOutcome()
        self._digest = 0
        self._mean = np.zeros(1 + session.world_size + 2 * len(names))
        spec = TensorSpec("commsched.agreement", self._mean.shape, "float64")
        self._group = session.register(Manifest((spec,)), {"float64": self._mean.view(np.uint8).data})

    def offer(self, done: RoundOutcome, fresh: Sequence[bool], frozen: Sequence[bool]) -> None:
        """Submit this rank's record: ``done``, and for each parameter whether its gradient is new and whether it is frozen.

        Waits only for the average of the last record.
        """
        self._group.begin_step()
        self._done = done
        text = json.dumps(done.to_record(), sort_keys=True)
        self._digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")
        ends = [done.ends and rank == self._session.rank for rank in range(self._session.world_size)]
        self._mean[:] = (self._digest, *ends, *fresh, *frozen)
        self._group.notify_ready(0)

    def share_with_gradient(self) -> Sequence[float]:
        """Return, for each parameter, the share of ranks that have a new gradient.

        Waits until all ranks have begun the round.

        Raises:
            RanksDiverged, UnsupportedError: see :meth:`require`.
        """
        self.require()
        first = 1 + self._session.world_size
        shares: list[float] = self._mean[first : first + len(self._names)].tolist()
        return shares

    @property
    def is_known(self) -> bool:
        """Whether all ranks have begun the last round of this rank."""
        return self._group.proxies[0].is_open

    @property
    def rounds(self) -> int:
        """The number of rounds that this rank has begun. The end counts as a round."""
        return self._group.next_step

    def require(self) -> None:
        """Wait until all ranks have begun the last round of this rank, and require equal records.

        Raises:
            RanksDiverged: the ranks did not do the same before that round.
            UnsupportedError: a parameter is frozen on some ranks.
            CommschedError: the session failed or was closed.
        """
        self._group.proxies[0].wait()
        ranks = self._session.world_size
        # Ends first: if only some ranks have ended, everything else differs for that reason alone.
        self._require_same_end([rank for rank, share in enumerate(self._mean[1 : 1 + ranks]) if share > 0])
        if abs(self._mean[0] - self._digest) > 1e-3:
            what = f"numbers of the optimizer of {self._what}"
            end_with_difference(self._session, what, self.rounds - 1, self._done.to_record())
        for name, share in zip(self._names, self._mean[1 + ranks + len(self._names) :].tolist()):
            if 0 < share < 1:
                raise UnsupportedError(f"parameter '{name}' has grad_req='null' on some ranks only: set it on all, or on none")

    def _require_same_end(self, ended: Sequence[int]) -> None:
        others = [rank for rank in range(self._session.world_size) if rank not in ended]
        if ended and others:
            raise RanksDiverged(
                f"rank {_listed(ended)} ended the training of {self._what} after {self.rounds - 1} steps, by detach() or the "
                f"end of the session, and rank {_listed(others)} did not: give all ranks equally many batches, and call "
                "detach() on all or on none"
            )

    def release(self) -> None:
        self._group.release()


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
