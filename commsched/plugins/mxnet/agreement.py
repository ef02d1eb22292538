"""What the ranks tell each other in each round beside its gradients, so that none parts from the others unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

import commsched

from ...core.errors import UnsupportedError
from ...core.manifest import Manifest, TensorSpec

#: Relative: of the mean of equal numbers.
_ROUNDING = 1e-9


@dataclass
class Done:
    """What a rank has done until a round began. Numbers, since they are compared by their mean."""

    ends: int = 0  # 1: this is no round; none comes
    updates: int = 0
    rescale_grad: float = 0.0  # of the last update, as is the next
    learning_rate: float = 0.0
    loaded: int = 0  # a digest of what load_states() has read
    numbers: int = 0  # a digest of the optimizer's numbers and each parameter's lr_mult and wd_mult at the last update


#: For each field of :class:`Done`. Ends first: a rank that goes on differs in other fields for that reason alone.
_WHAT = (
    (
        "has ended its training or not ({}, the mean is {}): detach(), or the end of the session",
        "make equally many steps on all ranks, and call detach() on all",
    ),
    ("has called update() {} times, other ranks {} times on the mean", "call step(), or update(), equally often on all ranks"),
    (
        "has scaled gradients by {}, where the mean of all ranks is {}",
        "give step() the same batch_size on all ranks, the mean of theirs where they differ",
    ),
    ("has a learning rate of {}, where the mean of all ranks is {}", "set the same on all ranks"),
    ("has called load_states() with other contents than other ranks ({}, the mean is {})", "load the same on all ranks"),
    (
        "has set another number of its optimizer (such as wd or momentum, or a parameter's lr_mult) than other ranks "
        "({}, the mean is {})",
        "set the same on all ranks",
    ),
)


class Agreement:
    """A group of its own, of one tensor of float64, which no wire dtype narrows: nothing waits for it by sharing its partition.

    ``names``: of the parameters.
    """

    def __init__(self, session: commsched.Session, names: Sequence[str]) -> None:
        self._rank = session.rank
        self._names = names
        self._mean = np.zeros(len(_WHAT) + 2 * len(names))
        self._own = self._mean.copy()
        spec = TensorSpec("commsched.agreement", self._mean.shape, "float64")
        self._group = session.register(Manifest((spec,)), {"float64": self._mean.view(np.uint8).data})

    def offer(self, done: Done, fresh: Sequence[bool], frozen: Sequence[bool]) -> None:
        """Tell what this rank has done, and which parameters have a new gradient or need none. Waits for what was offered
        last only."""
        self._group.begin_step()
        self._own[:] = self._mean[:] = (*astuple(done), *fresh, *frozen)
        self._group.notify_ready(0)

    def share_with_gradient(self) -> Sequence[float]:
        """For each parameter, the share of ranks that have a new gradient. Waits until all ranks have begun the round.

        Raises:
            UnsupportedError: see :meth:`require`.
        """
        self.require()
        shares: list[float] = self._mean[len(_WHAT) : len(_WHAT) + len(self._names)].tolist()
        return shares

    @property
    def is_known(self) -> bool:
        """Whether all ranks have begun the round that was begun last."""
        return self._group.proxies[0].is_open

    def require(self) -> None:
        """
        Raises:
            UnsupportedError: the ranks have not done the same until the round that was begun last.
            CommschedError: the session failed or was closed.
        """
        self._group.proxies[0].wait()
        for (what, hint), own, mean in zip(_WHAT, self._own.tolist(), self._mean.tolist()):
            if abs(own - mean) > _ROUNDING * max(abs(own), abs(mean)):
                raise UnsupportedError(
                    f"rank {self._rank} {what.format(f'{own:.9g}', f'{mean:.9g}')}: the ranks would part; {hint}"
                )
        for name, share in zip(self._names, self._mean[len(_WHAT) + len(self._names) :].tolist()):
            if 0 < share < 1:
                raise UnsupportedError(f"parameter '{name}' has grad_req='null' on some ranks only: set it on all, or on none")

    def release(self) -> None:
        self._group.release()
