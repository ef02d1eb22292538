"""Models whose gradients are nobody else's business yet."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
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
        if isinstance(module, (DataParallel, *_wrappers())):
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
    if _find_wrapper(ours):
        gc.collect()  # one that is gone lives on until then
        if wrapper := _find_wrapper(ours):
            raise UnsupportedError(f"the model is wrapped in {wrapper}, which averages too: {_KEEP_DDP}")


def _wrappers() -> tuple[type[torch.nn.Module], ...]:
    """Classes of modules that average gradients. What nobody has imported takes long to import, and wraps nothing."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return (DistributedDataParallel, fsdp) if fsdp is not None else (DistributedDataParallel,)


def _find_wrapper(ours: set[int]) -> str | None:
    """DDP reads gradients in C++, where no guard is seen, and its model does not know of it; but an object refers to its class,
    and the collector finds who refers to what in a fraction of the time that a look at all objects takes."""
    classes = [*_wrappers()]
    for each in classes:  # which grows meanwhile
        classes += each.__subclasses__()
    # Those that are made, as modules at least; their own parameters() may do more than to list them.
    made = [each for each in gc.get_referrers(*classes) if type(each) in classes and "_modules" in vars(each)]
    parameters = torch.nn.Module.named_parameters
    return next((type(each).__name__ for each in made if any(id(one) in ours for _, one in parameters(each))), None)


def refuse_wrapping(ours: Container[int]) -> None:
    """From now on, what would average the gradients of parameters with these ids too cannot be put around a module of theirs.

    ``ours`` may change. It is for the whole process, and costs nothing but when modules are put together.
    """

    def refuse(wrapper: torch.nn.Module, _: str, module: Any) -> None:
        if isinstance(wrapper, _wrappers()) and any(id(parameter) in ours for parameter in module.parameters()):
            raise UnsupportedError(
                f"{type(wrapper).__name__} is put around a model whose gradients a ScheduledOptimizer averages: {_KEEP_DDP}"
            )

    register_module_module_registration_hook(refuse)
