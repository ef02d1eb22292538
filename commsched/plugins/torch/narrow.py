"""Running the user's own optimizer for some of its parameters, with the hyper-parameters of the moment of ``step()``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ...core.errors import UnsupportedError


def updates_each_parameter_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` for all parameters equals several calls, each for some of them.

    Known for the optimizers of ``torch.optim``. Others may keep counters in their groups or use a norm over all gradients,
    so for them the whole update is one call, which needs all averages.
    """
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def require_supported(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        UnsupportedError: an optimizer that evaluates the model several times per step.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS is not supported: it runs backward several times within one step")


def snapshot(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of every group, as they are now; those that are tensors are copied."""
    return [{key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copy(item) for item in value)
    return {key: _copy(item) for key, item in value.items()} if type(value) is dict else value


def step_some(
    optimizer: torch.optim.Optimizer,
    hyper_parameters: list[dict[str, Any]],
    parameters: Iterable[tuple[int, torch.nn.Parameter]],
) -> None:
    """``optimizer.step()`` for ``(group index, parameter)`` pairs only, which have their gradients in ``.grad``.

    It may be called from anywhere a parameter is read, so it leaves inference and autocast mode for the update.
    """
    by_group: dict[int, list[torch.nn.Parameter]] = {}
    for index, parameter in parameters:
        by_group.setdefault(index, []).append(parameter)
    narrowed = [{**hyper_parameters[index], "params": chosen} for index, chosen in sorted(by_group.items())]
    if not narrowed:
        return
    every_group = optimizer.param_groups
    optimizer.param_groups = narrowed
    try:
        device = narrowed[0]["params"][0].device.type  # of all: see device_of
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            optimizer.step()
    finally:
        optimizer.param_groups = every_group
