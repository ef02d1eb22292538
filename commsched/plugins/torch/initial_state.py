"""All ranks begin with rank 0's parameters, buffers and optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

import commsched

from ...core.errors import ManifestMismatch, UnsupportedError
from ..beginning import first_difference
from .first_use import no_use

log = logging.getLogger("commsched")

_SCALARS = (int, float, bool, str, type(None))


def broadcast_model(session: commsched.Session, model: torch.nn.Module, beside: Mapping[str, torch.Tensor]) -> None:
    """Parameters, trained or not, and buffers of every type, bit for bit; and those of ``beside`` that the model lacks.

    Raises:
        ManifestMismatch: the ranks' models differ in a name, shape or type.
    """
    named: dict[str, torch.Tensor] = {f"parameter '{name}'": tensor for name, tensor in model.named_parameters()}
    inside = {id(tensor) for tensor in named.values()}
    named |= {f"parameter '{name}'": tensor for name, tensor in beside.items() if id(tensor) not in inside}
    named |= {f"buffer '{name}'": tensor for name, tensor in model.named_buffers()}
    records = session.gather([[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in named.items()])
    if different := first_difference(records):
        rank, ours, other = different
        raise ManifestMismatch(f"the model has {_text(ours)} on rank 0 but {_text(other)} on rank {rank}")
    broadcast_parameters(session, named)


def broadcast_parameters(session: commsched.Session, named: Mapping[str, torch.Tensor]) -> None:
    """Rank 0's values of tensors that all ranks have, with the same names, shapes and types."""
    with no_use():
        _broadcast(session, "initial parameters and buffers", [tensor.detach() for tensor in named.values()])


def require_same_group(session: commsched.Session, optimizer: torch.optim.Optimizer, index: int) -> None:
    """
    Raises:
        ManifestMismatch: the options of the optimizer's param_group with this ``index`` differ between ranks.
    """
    records = session.gather(_options(optimizer)[index]["options"])
    for rank, record in enumerate(records):
        for key in records[0].keys() | record.keys():
            ours, theirs = records[0].get(key), record.get(key)
            if ours != theirs:
                raise ManifestMismatch(f"param_groups[{index}]['{key}'] is {ours} on rank 0 but {theirs} on rank {rank}")


def _text(described: list[Any] | None) -> str:
    return "nothing more" if described is None else f"{described[0]} {described[2]}{described[1]}"


def broadcast_optimizer(session: commsched.Session, optimizer: torch.optim.Optimizer) -> None:
    """The state and hyper-parameters of rank 0's optimizer, which may come from a checkpoint only rank 0 has read.

    Raises:
        ManifestMismatch: the ranks' optimizers have different groups.
        UnsupportedError: rank 0's state holds something that is neither a tensor nor a plain value.
    """
    records = session.gather({"groups": _options(optimizer), "state": _describe_state(optimizer)})
    for rank, record in enumerate(records):
        sizes, first = [group["parameters"] for group in record["groups"]], [g["parameters"] for g in records[0]["groups"]]
        if sizes != first:
            raise ManifestMismatch(f"the optimizer's groups hold {first} parameters on rank 0 but {sizes} on rank {rank}")
    if records[session.rank]["groups"] != records[0]["groups"]:  # both as JSON: it has no tuples
        log.warning("rank %d: the optimizer's hyper-parameters are replaced by those of rank 0", session.rank)
        for group, options in zip(optimizer.param_groups, records[0]["groups"]):
            group.update({key: _like(group.get(key), value) for key, value in options["options"].items()})
    _broadcast(session, "initial optimizer state", _adopt_state(optimizer, records[0]["state"], session.rank == 0))


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            "parameters": len(group["params"]),
            "options": {key: _plain(value) for key, value in group.items() if _is_plain(value)},
        }
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    """Whether it can travel as JSON: a number or the like, a tensor of one, or a tuple or list of such."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _SCALARS) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _like(old: Any, new: Any) -> Any:
    """JSON knows neither tuples nor tensors: ``new`` in the form that ``old`` has."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, new)
    if isinstance(old, tuple | list) and isinstance(new, list):
        return type(old)(map(_like, old, new) if len(old) == len(new) else new)
    return new


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _describe_state(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """One entry for each value: parameter index, key, and a tensor's shape, dtype, strides (None: those of the parameter, which
    has its shape) and whether it lies beside the parameter."""
    described: list[list[Any]] = []
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
                alike = value.shape == parameter.shape and value.stride() == parameter.stride()
                strides = None if alike else list(torch.empty_like(value, device="meta").stride())
                described.append([index, key, "tensor", shape, dtype, strides, value.device == parameter.device])
            elif isinstance(value, _SCALARS):
                described.append([index, key, "plain", value])
            else:
                raise UnsupportedError(
                    f"the optimizer's state '{key}' is a {type(value).__name__}; only tensors and plain values can be broadcast"
                )
    return described


def _adopt_state(optimizer: torch.optim.Optimizer, described: list[list[Any]], is_root: bool) -> list[torch.Tensor]:
    """Give the optimizer a state as described, except on the root that has it; the tensors, in the order described."""
    parameters = _parameters(optimizer)
    if not is_root:
        optimizer.state.clear()
    tensors = []
    for index, key, kind, *rest in described:
        state = optimizer.state[parameters[index]]
        if kind == "plain":
            state[key] = rest[0]
            continue
        shape, dtype, strides, beside = rest
        if not is_root:
            device = parameters[index].device if beside else torch.device("cpu")
            options: Any = {"dtype": getattr(torch, dtype), "device": device}
            if strides is None:
                state[key] = torch.empty_like(parameters[index], requires_grad=False, **options)
            else:
                state[key] = torch.empty_strided(shape, strides, **options)
        tensors.append(state[key].detach())
    return tensors


def _broadcast(session: commsched.Session, name: str, tensors: list[torch.Tensor]) -> None:
    """In one flat buffer of bytes."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=session.device)
    pieces = torch.split(flat, sizes) if sizes else ()
    with torch.no_grad():
        if session.rank == 0:
            for piece, tensor in zip(pieces, tensors):
                piece.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
        if flat.is_cuda:
            torch.cuda.current_stream(flat.device).synchronize()
        session.broadcast(name, flat if flat.is_cuda else flat.numpy().data)
        if session.rank != 0:
            for piece, tensor in zip(pieces, tensors):
                tensor.copy_(piece.clone().view(tensor.dtype).reshape(tensor.shape))
