"""Copies of what the update of one parameter changes: its values, and the optimizer's state for it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from .guard import unguarded
from .marked import unnoticed


class Saved(NamedTuple):
    """``state`` is None if the optimizer had none for the parameter. ``devices``: of the tensors in the optimizer's state."""

    values: torch.Tensor
    state: dict[str, Any] | None
    devices: dict[str, torch.device]


def saved_for_update(
    parameter: torch.Tensor, state: Mapping[str, Any] | None, memory: Saved | None, in_host: bool = False
) -> Saved:
    """Copy the values of ``parameter``, whose update is due, and its ``state``, on their devices or in the host's memory. The
    memory of an earlier copy is used again."""
    with torch.inference_mode(False), torch.no_grad(), unguarded(), unnoticed():
        values = copied(parameter.detach(), None if memory is None else memory.values, in_host)
        if state is None:
            return Saved(values, None, {})
        before = {} if memory is None or memory.state is None else memory.state
        devices = {key: value.device for key, value in state.items() if isinstance(value, torch.Tensor)}
        return Saved(values, {key: copied(value, before.get(key), in_host) for key, value in state.items()}, devices)


def put_back(parameter: torch.Tensor, saved: Saved) -> dict[str, Any] | None:
    """Give ``parameter``, which waits for no update, its saved values. Return a copy of the saved state, on its devices."""
    with torch.inference_mode(False), torch.no_grad():
        parameter.copy_(saved.values)
        if saved.state is None:
            return None
        return {
            key: value.to(saved.devices[key], copy=True) if key in saved.devices else deepcopy(value)
            for key, value in saved.state.items()
        }


def copied(value: Any, memory: Any = None, in_host: bool = False) -> Any:
    """Copy ``value``, into ``memory`` if that fits."""
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    device = torch.device("cpu") if in_host else value.device
    if isinstance(memory, torch.Tensor) and (memory.shape, memory.dtype, memory.device, memory.stride()) == (
        value.shape,
        value.dtype,
        device,
        value.stride(),
    ):
        return memory.copy_(value)
    return value.to(device, copy=True)
