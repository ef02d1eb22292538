"""Gradients of the same norm that are not the same have another projection."""

from __future__ import annotations

import pytest
import torch

from commsched.plugins.torch.projection import projection

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
SIZES = [1, 7, 1 << 14, (1 << 14) + 3, (1 << 20) + (1 << 15) + 5]


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_linear_and_says_the_same_of_the_same(size: int, dtype: torch.dtype) -> None:
    gradient = values(size, dtype)
    of_it, norm = projection(gradient), float(gradient.double().norm())
    assert of_it == projection(gradient.clone())
    assert abs(of_it - projection(gradient.double())) <= DTYPES[dtype] * norm  # summed in the type of the values
    assert projection(gradient * 2) == 2 * of_it
    assert abs(of_it) < 4 * norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES[1:])
def test_edits_that_leave_the_norm_are_seen(size: int, dtype: torch.dtype) -> None:
    gradient = values(size, dtype)
    far = 1e-3 * abs(float(gradient.double().norm()))
    last = gradient.clone()
    last[-1] = -last[-1]
    for edited in (-gradient, gradient.flip(0), gradient.roll(1), gradient.roll(1 << 14) if size > 1 << 14 else -gradient):
        assert abs(projection(edited) - projection(gradient)) > far
    assert projection(last) != projection(gradient)


def test_of_what_is_empty_or_not_finite_it_is_zero() -> None:
    assert projection(torch.zeros(0)) == 0.0
    assert projection(torch.zeros(3, 4)) == 0.0
    assert projection(torch.tensor([1.0, float("nan")])) == 0.0
    assert projection(torch.tensor([float("inf")])) == 0.0


def test_strides_do_not_matter() -> None:
    gradient = values(24, torch.float32).view(4, 6)
    assert projection(gradient.t().contiguous().t()) == projection(gradient)
