"""Checks when an optimizer is wrapped: models and parameters that cannot be scheduled raise an error that names them."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ...core.errors import ConfigError, UnsupportedError, and_more

_KEEP_DDP = "call the model itself, without it; or keep it, with commsched.plugins.torch.comm_hook"


def require_optimizer_and_model(optimizer: object, model: object) -> None:
    """Require an optimizer and a model, in this order; raises TypeError otherwise."""
    if isinstance(optimizer, torch.nn.Module):
        what = (
            "the arguments are swapped"
            if hasattr(model, "param_groups")
            else f"a {type(optimizer).__name__} is not an optimizer"
        )
        raise TypeError(f"{what}: it is ScheduledOptimizer(optimizer, model)")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"a {type(optimizer).__name__} is not an optimizer: it has no param_groups")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"a {type(model).__name__} is not a torch.nn.Module: give the model that the optimizer updates; several as "
            "torch.nn.ModuleList([first, second])"
        )


def outside_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Return a warning if some parameters of ``optimizer`` do not belong to ``model``, else None. Raises ConfigError if none of
    them does, so ``model`` is not the model that is trained."""
    inside = {id(parameter) for parameter in model.parameters()}
    total, outside = 0, []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            total += 1
            if id(parameter) not in inside:
                outside.append(f"param_groups[{index}]['params'][{position}] {list(parameter.shape)}")
    if not outside:
        return None
    which = ", ".join(outside[:3]) + and_more(len(outside[3:]))
    if len(outside) == total:
        raise ConfigError(
            f"none of the optimizer's parameters ({which}) belongs to the {type(model).__name__} given with it: give the model "
            "that it updates, or make the optimizer when the model is complete"
        )
    return (
        f"{len(outside)} of the optimizer's {total} parameters do not belong to the {type(model).__name__} given with it: "
        f"{which}. Their gradients are averaged all the same, but buffers of their modules are not made equal. If a part of "
        "the model was replaced, make the optimizer after that; if they are another module's, give both as torch.nn.ModuleList"
    )


def require_plain(model: torch.nn.Module, parameters: Iterable[torch.Tensor]) -> None:
    """Require that every rank has the whole model, and that nothing else averages its gradients.

    Raises UnsupportedError if a wrapper such as DDP averages the gradients of the optimizer's ``parameters`` already, or a
    parameter is sharded over ranks (a DTensor), or has no shape yet (a lazy module).
    """
    for name, module in model.named_modules():
        if isinstance(module, (DataParallel, *_wrappers())):
            where = f"module '{name}'" if name else "the model"
            keep = f": {_KEEP_DDP}" if isinstance(module, DistributedDataParallel) else "; give the model itself, not wrapped"
            raise UnsupportedError(f"{where} is wrapped in {type(module).__name__}{keep}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(f"parameter '{name}' has no shape yet; run the lazy module once before")
        if type(parameter).__name__ == "DTensor":
            raise UnsupportedError(f"parameter '{name}' is a DTensor (FSDP, tensor parallelism); each rank must have all of it")
    ours = {id(parameter) for parameter in parameters}
    if _find_wrapper(ours):
        gc.collect()  # a dropped wrapper may exist until it is collected
        if wrapper := _find_wrapper(ours):
            raise UnsupportedError(f"the model is wrapped in {wrapper}, which averages too: {_KEEP_DDP}")


def _wrappers() -> tuple[type[torch.nn.Module], ...]:
    """The classes of modules that average gradients. FSDP takes long to import; if it is not imported, it wraps no model."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return (DistributedDataParallel, fsdp) if fsdp is not None else (DistributedDataParallel,)


def _find_wrapper(ours: set[int]) -> str | None:
    """Return the class name of a wrapper, such as DDP, that averages parameters with the ids ``ours``, or None.

    DDP reads gradients in C++, where guards are not seen, and the model has no reference to its DDP. But each object refers to
    its class, and the garbage collector finds the referrers of a class much faster than a search through all objects.
    """
    classes = [*_wrappers()]
    for each in classes:  # the list grows during the loop
        classes += each.__subclasses__()
    # Only initialized modules. Their own parameters() may do more than list parameters, so the function of Module is called.
    made = [each for each in gc.get_referrers(*classes) if type(each) in classes and "_modules" in vars(each)]
    parameters = torch.nn.Module.named_parameters
    return next((type(each).__name__ for each in made if any(id(one) in ours for _, one in parameters(each))), None)


def refuse_wrapping(ours: Container[int]) -> None:
    """Refuse from now on a wrapper (DDP, FSDP) around any module that contains a parameter with an id in ``ours``.

    ``ours`` may change. The check applies to the whole process, and costs time only when a module is registered in another.
    """

    def refuse(wrapper: torch.nn.Module, _: str, module: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if isinstance(wrapper, _wrappers()) and any(id(parameter) in ours for parameter in module.parameters()):
            raise UnsupportedError(
                f"{type(wrapper).__name__} is put around a model whose gradients a ScheduledOptimizer averages: {_KEEP_DDP}"
            )

    register_module_module_registration_hook(refuse)


#: Tensors are compared byte by byte up to this many bytes.
_MOST_COMPARED_BYTES = 64 * 2**20


def is_public(tensor: torch.Tensor) -> bool:
    """Whether other processes may have the memory of ``tensor``. Memory of a device always counts as shared for torch."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_shared()


def find_overlap(named: Mapping[str, torch.Tensor], trained: set[int]) -> tuple[str, str] | None:
    """Return the names of two tensors that may share bytes, so that an update of one changes the other, or None.

    At least one of the two is in ``trained`` (ids). Adjacent views of one buffer do not share bytes.
    """
    reach, widest = 0, ""  # the end of the tensors so far, and the tensor that reaches there
    for start, end, name in _extents(named):
        if start < reach and named[name] is not named[widest] and {id(named[name]), id(named[widest])} & trained:
            return widest, name
        if end > reach:
            reach, widest = end, name
    return None


def sharers(named: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """By the name of each tensor that shares bytes with others that begin before, or as early: their names, and how it lies in
    them."""
    found: dict[str, list[str]] = {}
    before: list[tuple[int, str]] = []  # the ends and the names of those that reach as far as here
    for start, end, name in _extents(named):
        before = [(reach, other) for reach, other in before if reach > start]
        its = named[name]
        shared = [other for _, other in before if named[other] is not its and share_bytes(named[other], its)]
        if shared:
            found[name] = sorted(
                f"{other} ({start - named[other].data_ptr()} bytes in, strides {_strides(its)} and {_strides(named[other])})"
                for other in shared
            )
        before.append((end, name))
    return found


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride())]


def _extents(named: Mapping[str, torch.Tensor]) -> list[tuple[int, int, str]]:
    """The addresses at which each tensor begins and ends, with its name, in this order."""
    return sorted(
        (tensor.data_ptr(), tensor.data_ptr() + _extent_bytes(tensor), name)
        for name, tensor in named.items()
        if tensor.layout == torch.strided and not tensor.is_nested and tensor.numel() > 0 and tensor.data_ptr() != 0
    )


def share_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors whose extents overlap have a byte in common: columns of one matrix do not. Large ones are taken
    to."""
    if first.data_ptr() == second.data_ptr() or (first.is_contiguous() and second.is_contiguous()):
        return True
    start = min(first.data_ptr(), second.data_ptr())
    total = max(tensor.data_ptr() + _extent_bytes(tensor) for tensor in (first, second)) - start
    if total > _MOST_COMPARED_BYTES:
        return True
    marks = torch.zeros(total, dtype=torch.bool, device="cpu")
    views = []
    for tensor in (first, second):
        # The marks show an element once that ``expand()`` repeats.
        shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride())]
        if math.prod(shape) * tensor.element_size() > _MOST_COMPARED_BYTES:
            return True
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        views.append(marks.as_strided((*shape, tensor.element_size()), (*strides, 1), tensor.data_ptr() - start))
    views[1].fill_(True)
    return bool(views[0].any())


def _extent_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


class Rows:
    """Records which rows of a sparse gradient any rank has touched. Optimizers for sparse gradients skip untouched rows. A
    touched row may be zero, so the values do not show which rows were touched.

    ``touched`` is the rows' place in a flat buffer. It has one float per row: once averaged, the share of ranks that touched
    the row.
    """

    def __init__(self, touched: torch.Tensor) -> None:
        self._touched = touched

    @torch.no_grad()
    def write(self, gradient: torch.Tensor | None, view: torch.Tensor) -> None:
        """Put the sparse ``gradient`` (None: no row) into the dense ``view`` and the rows."""
        view.zero_()
        self._touched.zero_()
        if gradient is not None:
            gradient = gradient.coalesce()
            rows = gradient.indices()[0]
            view.index_copy_(0, rows, gradient.values())
            self._touched.index_fill_(0, rows, 1.0)

    @torch.no_grad()
    def read(self, view: torch.Tensor) -> torch.Tensor:
        """Return the average as a coalesced sparse tensor of the rows that any rank has touched."""
        rows = self._touched.nonzero().squeeze(1)
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), view[rows], view.shape, device=view.device, is_coalesced=True, check_invariants=False
        )


def sparse_weights(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters whose modules make sparse gradients."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
