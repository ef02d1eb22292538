"""Comparison between ranks, so that none diverges unnoticed: what they do in each round, the weights, and the numbers of the
optimizer, with the requirements on every optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mxnet as mx
import numpy as np

import commsched

from ...core.comparison import require_same
from ...core.errors import RanksDiverged, UnsupportedError, ranks_text
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
    """Each rank says in each round its :class:`RoundOutcome`, whether each rank has ended, whether each parameter has a new
    gradient, and whether it is frozen.

    ``what`` names the optimizer in errors, and is unique in the session. ``names`` are those of the parameters.
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
        """Return, for each parameter, the share of ranks that have a new gradient. Waits until all ranks have begun the round,
        and raises as :meth:`require`."""
        self.require()
        first = self._session.world_size
        return self._flags.means()[first : first + len(self._names)]

    @property
    def is_known(self) -> bool:
        """Whether all ranks have begun the last round of this rank."""
        return self._flags.is_there

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
            steps = self._flags.group.next_step - 1  # the end counts as a round
            raise RanksDiverged(
                f"{ranks_text(ended)} ended the training of {self._what} after {steps} steps, by detach() or the end of the "
                f"session, and {ranks_text(others)} did not: give all ranks equally many batches, and call "
                "detach() on all or on none"
            )

    def release(self) -> None:
        self._flags.group.release()


class ComparedWeights:
    """Compares digests of the weights after a step between ranks.

    The digests are sent once it is known that the ranks did the same up to that step. An error can then name the different
    action first, and not the different weights that it caused.

    ``what`` names the optimizer in errors, and is unique in the session. Each weight has a name and a size in bytes.
    """

    def __init__(self, session: commsched.Session, what: str, names: Sequence[str], nbytes: Sequence[int]) -> None:
        self._check = WeightsCheck(session, names, nbytes, f"weights of {what}")
        self._digests: dict[int, int] = {}

    def take(self, step: int, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Compute the digests of the weights, ``arrays``, after ``step``, if they are to be compared in this step. Waits for
        the updates of the part that is compared. Raises MXNetError if an operation that computes one of them failed."""
        if self._check.begin(step):
            for index, array in enumerate(arrays):
                part = self._check.wanted(index)
                if part is not None:
                    size = np.dtype(array.dtype).itemsize
                    values = array.as_nd_ndarray().reshape((-1,))[part[0] // size : part[1] // size].asnumpy()
                    self._digests[index] = digest_of(values.view(np.uint8).data)

    def compare(self) -> None:
        """Send the digests that were taken last, unless they were sent before. Raises CommschedError if the job failed, or the
        session is closed."""
        digests, self._digests = self._digests, {}
        for index, digest in digests.items():
            self._check.add(index, digest)


_SCALARS = (int, float, bool, str, np.generic)


def prepare_optimizer(optimizer: mx.optimizer.Optimizer) -> None:
    """Make ``optimizer`` update each parameter separately, so that no update waits for the average of another parameter. Raises
    UnsupportedError if it is SGLD."""
    if isinstance(optimizer, mx.optimizer.SGLD):
        raise UnsupportedError("SGLD adds noise, which each rank would draw for itself: ranks would diverge")
    optimizer.aggregate_num = min(1, optimizer.aggregate_num)  # 0 stays: such an optimizer cannot aggregate


def describe_optimizer(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return the class and the numbers of ``optimizer`` and of its scheduler, as JSON.

    ``rescale_grad`` is left out, because it is compared in each step.
    """
    numbers = _scalars(optimizer)
    numbers.pop("rescale_grad", None)
    scheduler = optimizer.lr_scheduler
    if scheduler is not None:
        numbers |= {f"lr_scheduler.{key}": value for key, value in _scalars(scheduler).items()}
        numbers["lr_scheduler"] = type(scheduler).__name__
    return {"class": type(optimizer).__name__, **numbers}


def _scalars(of: Any) -> dict[str, Any]:
    found = {key: value for key, value in getattr(of, "__dict__", {}).items() if isinstance(value, _SCALARS)}
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in found.items()}


def require_equal_optimizers(described: Sequence[Mapping[str, Any]]) -> None:
    """Require equal optimizers on all ranks. ``described[r]`` is the description of rank ``r``, see :func:`describe_optimizer`.
    Raises ManifestMismatch if the class or a number differs; the error names it."""
    require_same(described, lambda different: f"the optimizer's {different.key} is {different.text()}")


def numbers_of(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return all numbers that affect an update: those of :func:`describe_optimizer`, ``rescale_grad``, learning
    rate and multipliers."""
    numbers = {
        "learning_rate": float(optimizer.learning_rate),
        "rescale_grad (of the batch size)": float(optimizer.rescale_grad),
    }
    numbers |= describe_optimizer(optimizer)
    for key in ("lr", "lr_scheduler.base_lr"):  # the learning rate contains them
        numbers.pop(key, None)
    for parameter in optimizer.param_dict.values():
        numbers[f"lr_mult of {parameter.name}"] = float(parameter.lr_mult)
        numbers[f"wd_mult of {parameter.name}"] = float(parameter.wd_mult)
    numbers |= {f"lr_mult of key {key}": float(value) for key, value in optimizer.lr_mult.items()}
    numbers |= {f"wd_mult of key {key}": float(value) for key, value in optimizer.wd_mult.items()}
    return numbers


def digest_states(states: Mapping[Any, Any]) -> int:
    """Return a digest of the arrays and numbers in an updater's states. The pickles of equal states may differ."""
    digest = hashlib.blake2b(digest_size=5)

    def add(state: Any) -> None:
        if isinstance(state, (tuple, list)):
            for each in state:
                add(each)
        elif isinstance(state, Mapping):
            for key in sorted(state, key=str):
                digest.update(f"{key} ".encode())
                add(state[key])
        elif isinstance(state, (mx.nd.NDArray, np.ndarray)):
            digest.update((state.asnumpy() if isinstance(state, mx.nd.NDArray) else state).tobytes())
        elif isinstance(state, _SCALARS):
            digest.update(f"{state} ".encode())

    for index in sorted(states, key=str):
        digest.update(f"{index} ".encode())
        add(states[index])
    return int.from_bytes(digest.digest(), "big")
