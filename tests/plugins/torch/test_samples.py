"""Samples of gradients tell what ranks have done differently to them, and nothing of rounding."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commsched.plugins.torch.samples import Samples, first_sample_difference

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 16, 100, 1 << 14, (1 << 18) + 5]


class Slots:
    """Gradients in one flat buffer, as those of one rank."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        flat = torch.cat([each.reshape(-1) for each in values])
        self.slots: list[Any] = []
        views = flat.split([each.numel() for each in values])
        for flag, (each, view) in enumerate(zip(values, views)):
            gradient = view.view(each.shape).detach()
            parameter = torch.nn.Parameter(torch.zeros_like(each))
            parameter.grad = gradient
            self.slots.append(
                SimpleNamespace(flag=flag, view=view, gradient=gradient, parameter=parameter, rows=None, is_sparse=False)
            )

    def say(self, turn: int = 1, read: list[bool] | None = None) -> torch.Tensor | None:
        return Samples(self.slots).of(read or [True] * len(self.slots), turn)

    @property
    def rounding(self) -> torch.Tensor:
        return Samples(self.slots).rounding


def gradient(size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor], turn: int = 1) -> int | None:
    here, there = Slots(ours), Slots(theirs)
    own, other = here.say(turn), there.say(turn)
    assert own is not None
    assert other is not None
    mean = (own + other) / 2
    found = {first_sample_difference(mean, own, here.rounding), first_sample_difference(mean, other, here.rounding)}
    assert len(found) == 1  # both ranks see it
    return found.pop()


def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(like.dtype)


EDITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scaled": lambda g: g * 1.1,
    "scaled a little": lambda g: g * (1.05 if g.element_size() == 2 else 1 + 1e-4),
    "signs": lambda g: -g,
    "noise": lambda g: g + noise(g),
    "zeros": torch.zeros_like,
    "infinite": lambda g: torch.full_like(g, float("inf")),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_one_rank_does_to_a_gradient_is_seen_whatever_its_size(dtype: torch.dtype, name: str) -> None:
    gradients = [gradient(size, dtype) for size in SIZES]
    for flag, each in enumerate(gradients):
        edited = EDITS[name](each)
        assert difference(gradients, [*gradients[:flag], edited, *gradients[flag + 1 :]]) == flag


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_order_that_differs_is_seen(dtype: torch.dtype) -> None:
    gradients = [gradient(size, dtype) for size in SIZES[1:]]
    for flag, each in enumerate(gradients):
        edited = [*gradients[:flag], each.flip(0), *gradients[flag + 1 :]]
        assert flag in {difference(gradients, edited, turn) for turn in range(1, 4)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_not_taken_for_a_difference(dtype: torch.dtype) -> None:
    """That of each element, when it is scaled, and that of the factor."""
    gradients = [gradient(size, dtype) for size in SIZES]
    factor = 1 / 3 + (1e-12 if dtype == torch.float64 else 1e-7)
    wide = [(each.double() * (1 / 3)).to(dtype) for each in gradients]
    narrow = [(each * factor).to(dtype) for each in gradients]
    for turn in range(1, 20):
        assert difference(wide, narrow, turn) is None


def test_in_time_every_element_is_looked_at() -> None:
    whole = gradient(5000)
    for place in (0, 17, 2500, 4999):
        edited = whole.clone()
        edited[place] += 100.0
        assert any(difference([whole, gradient(100)], [edited, gradient(100)], turn) == 0 for turn in range(1, 60))


def test_many_small_gradients_are_told_apart() -> None:
    gradients = [gradient(64 + flag) for flag in range(3000)]
    edited = list(gradients)
    edited[2999] = -edited[2999]
    assert difference(gradients, edited) == 2999


def test_what_was_not_read_on_a_rank_is_no_difference() -> None:
    ours, theirs = Slots([gradient(3), gradient(4)]), Slots([-gradient(3), gradient(4)])
    own, other = ours.say(read=[True, True]), theirs.say(read=[False, True])
    assert own is not None
    assert other is not None
    assert first_sample_difference((own + other) / 2, own, ours.rounding) is None
    assert ours.say(read=[False, False]) is None
    assert Slots([gradient(1)[:0]]).say() is None


def test_of_several_differences_the_first_is_named() -> None:
    gradients = [gradient(8 + flag) for flag in range(4)]
    assert difference(gradients, [gradients[0], -gradients[1], gradients[2], -gradients[3]]) == 1


def test_what_is_read_may_change_from_round_to_round() -> None:
    slots = Slots([gradient(3), gradient(4)])
    samples = Samples(slots.slots)
    for read in ([True, True], [False, True], [True, False], [True, True]):
        said, alone = samples.of(read, 1), slots.say(read=read)
        assert said is not None
        assert alone is not None
        assert torch.equal(said.nan_to_num(7), alone.nan_to_num(7))
        assert said[0].isnan().tolist() == [not each for each in read]
    slots.slots[0].parameter.grad = -slots.slots[0].gradient
    said, alone = samples.of([True, True], 1), slots.say()
    assert said is not None
    assert alone is not None
    assert torch.equal(said, alone)


def test_gradients_that_are_not_in_the_buffer() -> None:
    """Sparse ones, and those that were replaced."""
    said = []
    for sign in (1, -1):
        slots = Slots([gradient(8), gradient(12).view(4, 3), gradient(5), gradient(1)[:0]])
        replaced, sparse = slots.slots[0], slots.slots[1]
        replaced.parameter.grad = sign * replaced.gradient.clone()
        sparse.parameter.grad = sparse.gradient = (sign * gradient(12).view(4, 3)).to_sparse(1)
        sparse.rows = object()
        said.append(slots.say())
    own, other = said
    assert own is not None
    assert other is not None
    assert torch.equal(
        own[0],
        other[0],
    ) or torch.allclose(own[0], other[0], equal_nan=True)
    assert torch.allclose(own[1, :2], -other[1, :2])
    assert torch.equal(own[:, 2], other[:, 2])
    assert own[:, 3].isnan().all()


def test_the_device_that_is_the_default_does_not_matter() -> None:
    slots = Slots([gradient(8)])
    expected = slots.say()
    assert expected is not None
    with torch.device("meta"):
        said = slots.say()
    assert said is not None
    assert torch.equal(said, expected)
