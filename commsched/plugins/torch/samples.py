"""Samples of each gradient's elements, to detect that ranks have changed the same average in different ways."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import compress

import torch

from .guard import unguarded
from .slot import Slot

#: The number of adjacent elements in a run: reading a whole cache line costs as much as reading one element of it.
_RUN = 16
#: The number of elements that are sampled from all gradients in one step. Each gradient gives at least a run and at most
#: ``_MOST`` elements.
_ALL = 1 << 15
_MOST = 1 << 10


class Samples:
    """Computes the norm and a projection of a sample of each gradient's elements, by flag.

    A few elements are enough to detect what ranks do differently to whole gradients: a clip by a rank's own norm, noise, signs.
    Each round samples other elements, so that in time all elements are sampled. All gradients of one flat buffer are sampled
    together, because a call for each would take longer than clipping them. ``slots`` are by flag.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        runs = min(_MOST, max(_RUN, _ALL // max(1, len(slots)))) // _RUN
        self._runs = torch.arange(runs, dtype=torch.float64, device="cpu")
        self._any_sparse = any(slot.is_sparse for slot in slots)
        self._in_place: list[bool] = []  # by flag: the gradient was read, and lies in a flat buffer
        self._buffers: list[tuple[_Flat, torch.Tensor]] = []  # for each flat buffer: the gradients in place, and their flags
        self._direction = _direction(runs * _RUN)
        sampled = [min(int(slot.parameter.numel()), runs * _RUN) for slot in slots]
        eps = [torch.finfo(slot.parameter.dtype).eps if _has_gradients(slot) else 0.0 for slot in slots]
        # Tolerances, relative to the norm. Different processors may round an element differently (e), and so a factor that is
        # a sum of many (each). In the norm, most of the elements' rounding averages out.
        factor = [1e-10 if slot.parameter.dtype in (torch.float64, torch.complex128) else 1e-5 for slot in slots]
        rounding = [[each + 2 * e / math.sqrt(max(1, n)) for each, e, n in zip(factor, eps, sampled)]]
        rounding += [[each + 2 * e for each, e in zip(factor, eps)]]
        self.rounding = torch.tensor(rounding, dtype=torch.float64, device="cpu")

    def __len__(self) -> int:
        return len(self._slots)

    def of(self, read: Sequence[bool], turn: int, adopted: bool = False) -> torch.Tensor | None:
        """Return the norms and projections of the samples of the gradients that were ``read``, by flag, and that this rank has.

        ``turn`` is the number of the round; ``adopted`` says that every dense gradient lies in its buffer. The result is two
        rows of float64 on the gradients' device: norms and projections. The other gradients have NaN. A sample that is not
        finite has norm -1 and projection 0. None if there are no samples.
        """
        if True not in read:
            return None
        with unguarded(), torch.no_grad():
            in_place = list(read)
            if not adopted or self._any_sparse:
                in_place = [
                    is_read and slot.parameter.grad is slot.gradient and slot.rows is None
                    for slot, is_read in zip(self._slots, read)
                ]
            if in_place != self._in_place:
                self._in_place, self._buffers = in_place, _by_buffer(compress(self._slots, in_place))
            fractions = (self._runs + _fraction(turn)) / len(self._runs)
            said = [(self._say(flat.sample(fractions)), flags) for flat, flags in self._buffers]
            if not all(in_place):
                for slot, is_read, is_done in zip(self._slots, read, in_place):
                    values = _values(slot.parameter.grad) if is_read and not is_done else None
                    if values is not None and len(values):
                        flat = _Flat(values, [0], [len(values)])
                        said.append((self._say(flat.sample(fractions)), torch.tensor([slot.flag], device=values.device)))
            if not said:
                return None
            result = torch.full((2, len(self._slots)), math.nan, dtype=torch.float64, device=said[0][0].device)
            for what, flags in said:
                result.index_copy_(1, flags, what)
            return result

    def _say(self, samples: torch.Tensor) -> torch.Tensor:
        wide = samples.double()
        norm = torch.linalg.vector_norm(wide, dim=1)
        projection = wide @ self._direction.to(wide.device)
        finite = norm.isfinite()
        return torch.stack((torch.where(finite, norm, -1.0), torch.where(finite, projection, 0.0)))


class _Flat:
    """Several tensors that lie in one tensor, ``values``."""

    def __init__(self, values: torch.Tensor, starts: list[int], numels: list[int]) -> None:
        self._values = values
        starts_, numels_ = (torch.tensor(each, device=values.device).unsqueeze(1) for each in (starts, numels))
        self._starts = starts_
        self._rooms = (numels_ - _RUN + 1).clamp_min_(1).double()  # number of places where a run may begin
        self._lasts = (starts_ + numels_ - 1).unsqueeze(2)
        self._run = torch.arange(_RUN, device=values.device)

    def sample(self, fractions: torch.Tensor) -> torch.Tensor:
        """Return a row for each tensor, with a run at each of ``fractions`` of its length. In a tensor shorter than a run, the
        last element is repeated."""
        beginnings = self._starts + (self._rooms * fractions.to(self._values.device)).long()
        places = torch.minimum(beginnings.unsqueeze(2) + self._run, self._lasts)
        return self._values.index_select(0, places.view(-1)).view(len(places), -1)


def first_sample_difference(mean: torch.Tensor, own: torch.Tensor, rounding: torch.Tensor) -> int | None:
    """Return the first flag of a gradient that differs on this rank from the mean of all ranks, or None.

    Args:
        mean: the result of :meth:`Samples.of`, averaged over ranks. It has NaN for a gradient that a rank has not read; such a
            gradient is not compared.
        own: this rank's result.
        rounding: differences up to this tolerance, relative to the norm, are ignored.
    """
    longest = torch.maximum(own[0].abs(), mean[0].abs())
    near = (own - mean).abs() <= rounding * longest
    alike = mean[0].isnan() | (near[0] & ((own[0] < 0) | near[1]))
    return None if bool(alike.all()) else int(alike.logical_not().nonzero()[0])


def _by_buffer(slots: Iterable[Slot]) -> list[tuple[_Flat, torch.Tensor]]:
    by_buffer: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.view.numel() > 0:
            by_buffer.setdefault(slot.view.untyped_storage().data_ptr(), []).append(slot)
    return [
        (_flat(of_one), torch.tensor([slot.flag for slot in of_one], device=of_one[0].view.device))
        for of_one in by_buffer.values()
    ]


def _flat(slots: Sequence[Slot]) -> _Flat:
    views = [_real(slot.view) for slot in slots]
    storage = views[0].untyped_storage()
    values = views[0].new_empty(0).set_(storage, 0, (storage.nbytes() // views[0].element_size(),), (1,))
    return _Flat(values, [int(view.storage_offset()) for view in views], [view.numel() for view in views])


def _real(values: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


def _has_gradients(slot: Slot) -> bool:
    return slot.parameter.is_floating_point() or slot.parameter.dtype.is_complex


def _values(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return _real((gradient.coalesce().values() if gradient.is_sparse else gradient).detach()).reshape(-1)


def _fraction(turn: int) -> float:
    """Return a number between 0 and 1 that differs in each turn, and covers the interval after few turns. It has 10 bits, so
    that its product with a length is exact."""
    return math.floor(turn * 0.6180339887 % 1.0 * 2**10) / 2**10


@cache
def _direction(length: int) -> torch.Tensor:
    """Return the direction of the projection: random components between -1 and 1, the same on all ranks, which do not depend
    on the gradients."""
    generator = torch.Generator().manual_seed(20191027)
    return torch.rand(length, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)
