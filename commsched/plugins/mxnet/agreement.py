"""Comparison between ranks, so that none diverges unnoticed: what they do in each round, and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
import numpy as np

import commsched

from ...core.errors import RanksDiverged, UnsupportedError
from ..common.step_flags import StepFlags
from ..common.weights_check import WeightsCheck, digest_of


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
    """What each rank says in each round: its :class:`RoundOutcome`; for each rank, whether it has ended; and for each
    parameter, whether there is a new gradient and whether the parameter is frozen.

    Args:
        what: names the optimizer in errors. Unique in the session.
        names: names of the parameters.
    """

    def __init__(self, session: commsched.Session, what: str, names: Sequence[str]) -> None:
        self._session = session
        self._what = what
        self._names = names
        count = session.world_size + 2 * len(names)
        self._flags = StepFlags(session, "agreement", f"numbers of the optimizer of {what}", count)

    def offer(self, done: RoundOutcome, fresh: Sequence[bool], frozen: Sequence[bool]) -> None:
        """Submit this rank's record: ``done``, and for each parameter whether its gradient is new and whether it is frozen.

        Waits only for the average of the last record.
        """
        ends = [done.ends and rank == self._session.rank for rank in range(self._session.world_size)]
        self._flags.offer(done.to_record(), [*ends, *fresh, *frozen])

    def share_with_gradient(self) -> Sequence[float]:
        """Return, for each parameter, the share of ranks that have a new gradient.

        Waits until all ranks have begun the round.

        Raises:
            RanksDiverged, UnsupportedError: see :meth:`require`.
        """
        self.require()
        first = self._session.world_size
        return self._flags.means()[first : first + len(self._names)]

    @property
    def is_known(self) -> bool:
        """Whether all ranks have begun the last round of this rank."""
        return self._flags.is_there

    @property
    def rounds(self) -> int:
        """The number of rounds that this rank has begun. The end counts as a round."""
        return self._flags.group.next_step

    def require(self) -> None:
        """Wait until all ranks have begun the last round of this rank, and require equal records.

        Raises:
            RanksDiverged: the ranks did not do the same before that round.
            UnsupportedError: a parameter is frozen on some ranks.
            CommschedError: the session failed or was closed.
        """
        means = self._flags.means()
        ranks = self._session.world_size
        # Ends first: if only some ranks have ended, everything else differs for that reason alone.
        self._require_same_end([rank for rank, share in enumerate(means[:ranks]) if share > 0])
        self._flags.require_same()
        for name, share in zip(self._names, means[ranks + len(self._names) :]):
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
        self._flags.group.release()


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class ComparedWeights:
    """Compares digests of the weights after a step between ranks.

    The digests are sent once it is known that the ranks did the same up to that step. An error can then name the different
    action first, and not the different weights that it caused.

    Args:
        what: names the optimizer in errors. Unique in the session.
        names, nbytes: name and size in bytes of each weight.
    """

    def __init__(self, session: commsched.Session, what: str, names: Sequence[str], nbytes: Sequence[int]) -> None:
        self._check = WeightsCheck(session, names, nbytes, f"weights of {what}")
        self._digests: dict[int, int] = {}

    def take(self, step: int, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Compute the digests of the weights after ``step``, if they are to be compared in this step.

        Waits for the updates of the part of the weights that is compared.

        Args:
            arrays: all weights.

        Raises:
            MXNetError: an operation that computes one of the weights failed.
        """
        if self._check.begin(step):
            for index, array in enumerate(arrays):
                part = self._check.wanted(index)
                if part is not None:
                    size = np.dtype(array.dtype).itemsize
                    values = array.as_nd_ndarray().reshape((-1,))[part[0] // size : part[1] // size].asnumpy()
                    self._digests[index] = digest_of(values.view(np.uint8).data)

    def compare(self) -> None:
        """Send the digests that were taken last, unless they were sent before.

        Raises:
            CommschedError: the job failed, or the session is closed.
        """
        digests, self._digests = self._digests, {}
        for index, digest in digests.items():
            self._check.add(index, digest)
