"""Copies of what the update of one parameter changes: its values, and the optimizer's state for it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from .guard import unguarded
from .marked import unnoticed


class Saved(NamedTuple):
    """``state`` is None if the optimizer had none for the parameter."""

    values: torch.Tensor
    state: dict[str, Any] | None


def saved_for_update(parameter: torch.Tensor, state: Mapping[str, Any] | None, memory: Saved | None) -> Saved:
    """Copy the values of ``parameter``, whose update is due, and its ``state``. The memory of an earlier copy is used again."""
    with torch.inference_mode(False), torch.no_grad(), unguarded(), unnoticed():
        values = _copied(parameter.detach(), None if memory is None else memory.values)
        if state is None:
            return Saved(values, None)
        before = {} if memory is None or memory.state is None else memory.state
        return Saved(values, {key: _copied(value, before.get(key)) for key, value in state.items()})


def put_back(parameter: torch.Tensor, saved: Saved) -> dict[str, Any] | None:
    """Give ``parameter``, which waits for no update, its saved values. Return a copy of the saved state."""
    with torch.inference_mode(False), torch.no_grad():
        parameter.copy_(saved.values)
        if saved.state is None:
            return None
        return {key: _copied(value, None) for key, value in saved.state.items()}


def _copied(value: Any, memory: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if isinstance(memory, torch.Tensor) and (memory.shape, memory.dtype, memory.device, memory.stride()) == (
        value.shape,
        value.dtype,
        value.device,
        value.stride(),
    ):
        return memory.copy_(value)
    return value.clone()
