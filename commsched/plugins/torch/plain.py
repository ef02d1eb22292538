"""Models whose gradients are nobody else's business yet."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...core.errors import UnsupportedError

_KEEP_DDP = "call the model itself, without it; or keep it, with commsched.plugins.torch.comm_hook"


def require_plain(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """
    Args:
        parameters: those of the optimizer.

    Raises:
        UnsupportedError: something else averages the gradients already, or parameters are parts, or without a shape yet.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | DataParallel):
            where = f"module '{name}'" if name else "the model"
            raise UnsupportedError(
                f"{where} is wrapped in {type(module).__name__}; give the model itself, which is not wrapped"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(f"parameter '{name}' has no shape yet; run the lazy module once before")
        if type(parameter).__name__ == "DTensor":
            raise UnsupportedError(f"parameter '{name}' is a DTensor (FSDP, tensor parallelism); each rank must have all of it")
    ours = {id(parameter) for parameter in parameters}
    if _has_ddp(ours):
        gc.collect()  # one that is gone lives on until then
        if _has_ddp(ours):
            raise UnsupportedError(f"the model is wrapped in DistributedDataParallel, which averages too: {_KEEP_DDP}")


def _has_ddp(ours: set[int]) -> bool:
    """DDP reads gradients in C++, where no guard is seen, and its model does not know of it; but the collector does."""
    wrapped = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    return any(id(parameter) in ours for each in wrapped for parameter in each.parameters())


def require_no_ddp_forward() -> None:
    """
    Raises:
        UnsupportedError: DistributedDataParallel calls the model right now.
    """
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UnsupportedError(f"the model is trained through DistributedDataParallel, which averages too: {_KEEP_DDP}")
