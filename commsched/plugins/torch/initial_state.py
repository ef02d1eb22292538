"""Broadcast of the initial state: all ranks begin with rank 0's parameters, buffers and optimizer state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import commsched

from ...core.comparison import require_same
from ...core.errors import UnsupportedError
from ...devices import open_device
from .checks import sharers
from .compared import compared_keys
from .guard import unguarded
from .timing import no_use

log = logging.getLogger("commsched")

#: The number of bytes that are broadcast at a time, in a buffer beside the model.
PIECE_BYTES = 64 * 2**20

_NAMED = 5  # the maximum number of replaced hyper-parameters that a warning names
_SCALARS = (int, float, bool, str, type(None))


def broadcast_model(
    session: commsched.Session, model: torch.nn.Module, beside: Mapping[str, torch.Tensor], root: int = 0
) -> None:
    """Broadcast the parameters of ``root``, frozen or not, and buffers of every type, bit for bit; also those parameters
    ``beside`` the model, by name, that it lacks. Collective. Raises the errors of :func:`broadcast_parameters`."""
    named: dict[str, torch.Tensor] = {f"parameter '{name}'": tensor for name, tensor in model.named_parameters()}
    inside = {id(tensor) for tensor in named.values()}
    named |= {f"parameter '{name}'": tensor for name, tensor in beside.items() if id(tensor) not in inside}
    named |= {f"buffer '{name}'": tensor for name, tensor in model.named_buffers()}
    broadcast_parameters(session, named, root)


def broadcast_parameters(session: commsched.Session, named: Mapping[str, torch.Tensor], root: int = 0) -> None:
    """Broadcast the values that ``root`` has. Collective. Before anything is sent, it raises ManifestMismatch if ranks have
    other names, shapes or types, and UnsupportedError if a tensor is not dense or has no values."""
    with unguarded():  # nothing waits before all ranks have compared
        shared = sharers(named)
        described = [_described(name, tensor, shared.get(name, [])) for name, tensor in named.items()]
    records = session.gather(described)
    alike = [_with_sharing_of(records[root], record) for record in records]
    require_same(alike, lambda different: f"the model has {different.text(_text)}")
    with no_use():
        tensors = {name: tensor.detach() for name, tensor in named.items()}
    for name, tensor in tensors.items():
        if _oddity(tensor) is not None:
            mend = "give it values (to_empty, load_state_dict) before that" if tensor.is_meta else "make it a plain attribute"
            raise UnsupportedError(f"{name} is a {_kind(tensor)} tensor, which cannot be broadcast; {mend}")
    _broadcast(session, "parameters and buffers", [distinct(tensor) for tensor in tensors.values()], root)


def require_same_group(session: commsched.Session, optimizer: torch.optim.Optimizer, index: int) -> None:
    """Require that the optimizer's param_group ``index`` has, on all ranks, the same options that the update can depend on.
    Raises ManifestMismatch if an option differs between ranks."""
    records = session.gather(_options(optimizer)[index]["options"])
    keys = compared_keys(optimizer, records)
    compared = [{key: record.get(key, "not set") for key in sorted(keys)} for record in records]
    require_same(compared, lambda different: f"param_groups[{index}]['{different.key}'] is {different.text()}")


def _kind(tensor: torch.Tensor) -> str:
    oddity = _oddity(tensor)
    return str(tensor.dtype) if oddity is None else f"{tensor.dtype} {oddity}"


def _oddity(tensor: torch.Tensor) -> str | None:
    """Return why no rank can send the elements of ``tensor`` as bytes; None for a dense tensor with values. PyTorch
    ends the process if somebody reads the bytes of a quantized one."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_meta:
        return "meta"
    return None if tensor.layout is torch.strided else str(tensor.layout)


def _described(name: str, tensor: torch.Tensor, sharing: list[str]) -> list[Any]:
    """Describe, as JSON, what all ranks must have in common: name, type, shape, the shape of :func:`distinct`, its strides if
    even those elements share memory, and what :func:`sharers` says of it."""
    if _oddity(tensor) is not None:
        shape = [] if tensor.is_nested else list(tensor.shape)
        return [name, _kind(tensor), shape, shape, None, []]
    elements = distinct(tensor)
    strides = list(elements.stride()) if _overlaps(elements) else None
    return [name, _kind(tensor), list(tensor.shape), list(elements.shape), strides, sharing]


def _with_sharing_of(root: list[list[Any]], record: list[list[Any]]) -> list[list[Any]]:
    """``record``, with the root's sharing where this rank's elements share less: what the root has in one place may be in
    several here, and not the other way round. The shapes of :func:`distinct` must be equal."""
    if record is root or len(record) != len(root):
        return record
    filled = []
    for here, there in zip(record, root):
        *same, strides, sharing = here
        if same == there[:-2]:
            here = [*same, there[-2] if strides is None else strides, there[-1] if {*sharing} <= {*there[-1]} else sharing]
        filled.append(here)
    return filled


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements of ``tensor`` that ``expand()`` has not repeated. Who writes them writes all. A tensor of
    another layout comes back as it is."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        if stride == 0 and size > 0:
            tensor = tensor.select(dim, 0).unsqueeze(dim)  # this gives it a stride that a view as bytes accepts
    return tensor


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, as those of ``unfold()`` do: a step along a dimension does not always lead past all
    elements of those with smaller strides."""
    past = 0
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride <= past:
            return tensor.numel() > 0
        past += stride * (size - 1)
    return False


def _text(described: list[Any] | None) -> str:
    if described is None:
        return "nothing more"
    name, kind, shape, of_distinct, strides, sharing = described
    expanded = "" if shape == of_distinct else f" expanded from {of_distinct}"
    own = "" if strides is None else f" of strides {strides}, which may share memory"
    return f"{name} {kind}{shape}{expanded}{own}" + (f" in the memory of {' and '.join(sharing)}" if sharing else "")


def broadcast_optimizer(session: commsched.Session, optimizer: torch.optim.Optimizer, root: int | None = None) -> None:
    """Broadcast the state and hyper-parameters of ``root``'s optimizer. ``None`` means rank 0's, which may come from a
    checkpoint that no other rank has read; a warning names hyper-parameters that differ. Collective. Raises ManifestMismatch if
    the ranks' optimizers have different classes or groups, and UnsupportedError if a rank's state holds an object that cannot
    be broadcast."""
    records = session.gather(
        {"class": type(optimizer).__qualname__, "groups": _options(optimizer), "state": _describe_state(optimizer)}
    )
    require_same(
        [record["class"] for record in records],
        lambda different: (
            f"the optimizer is of class {different.text()}; even a subclass may make another update, so give all ranks the same"
        ),
    )
    sizes = [str([group["parameters"] for group in record["groups"]]) for record in records]
    require_same(sizes, lambda different: f"the optimizer's groups hold these numbers of parameters: {different.text()}")
    says, root = root is None, root or 0
    ours, theirs = records[session.rank]["groups"], records[root]["groups"]
    if ours != theirs:  # both have travelled as JSON, which has no tuples
        if says:
            replaced = _differences(ours, theirs)
            log.warning("rank %d: the optimizer's hyper-parameters are replaced by those of rank 0: %s", session.rank, replaced)
        take_options(optimizer, [group["options"] for group in theirs])
    state = _adopt_state(optimizer, records[root]["state"], session.rank == root)
    _broadcast(session, "optimizer state", state, root)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of each group, as values that can travel as JSON."""
    return [group["options"] for group in _options(optimizer)]


def take_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Give the groups the hyper-parameters that :func:`options_of` returned, on another rank or earlier."""
    for group, values in zip(optimizer.param_groups, options):
        group.update({key: _like(group.get(key), value) for key, value in values.items()})


def _differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    """Describe the first few options that differ."""
    texts = []
    for index, (here, there) in enumerate(zip(ours, theirs)):
        before, after = here["options"], there["options"]
        for key in dict.fromkeys([*after, *before]):  # keeps the order of the options
            if key not in after:
                texts.append(f"param_groups[{index}]['{key}'], which rank 0 does not have, stays {before[key]}")
            elif key not in before or before[key] != after[key]:
                texts.append(f"param_groups[{index}]['{key}'] {before.get(key, 'not set')} by {after[key]}")
    more = f", and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            "parameters": len(group["params"]),
            "options": {key: _plain(value) for key, value in group.items() if _is_plain(value)},
        }
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    """Whether ``value`` can travel as JSON: a scalar, a tensor of one element, or a tuple or list of such values."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _SCALARS) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def _like(old: Any, new: Any) -> Any:
    """Return ``new``, a value from JSON, in the form that ``old`` has, because JSON has neither tuples nor tensors."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, new)
    if isinstance(old, tuple | list) and isinstance(new, list):
        return type(old)(map(_like, old, new) if len(old) == len(new) else new)
    return new


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _describe_state(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """Describe the optimizer's state, with one entry for each value: the index of its parameter (None if the value belongs to
    the optimizer itself), its key, and its description."""
    parameters = parameters_of(optimizer)
    described: list[list[Any]] = []
    for index, parameter in enumerate(parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            described.append([index, key, _describe_value(value, parameter, key)])
    for key, value in optimizer.state.items():
        if isinstance(key, str):
            described.append([None, key, _describe_value(value, parameters[0], key)])
    return described


def _describe_value(value: Any, parameter: torch.Tensor, key: str) -> list[Any]:
    """Describe ``value`` as JSON. A tensor is described by its shape, dtype, strides (None if shape and strides are the
    parameter's), and whether it is on the parameter's device. Raises UnsupportedError if ``value`` cannot be broadcast."""
    if isinstance(value, torch.Tensor) and _oddity(value) is None:
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        alike = value.shape == parameter.shape and value.stride() == parameter.stride()
        strides = None if alike else list(torch.empty_like(value, device="meta").stride())
        return ["tensor", shape, dtype, strides, value.device == parameter.device]
    if isinstance(value, _SCALARS):
        return ["plain", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe_value(item, parameter, key) for item in value]]
    if type(value) is dict and all(isinstance(name, _SCALARS) for name in value):
        return ["dict", [[name, _describe_value(item, parameter, key)] for name, item in value.items()]]
    raise UnsupportedError(
        f"the optimizer's state '{key}' holds a {_type_text(value)}; only dense tensors with values, plain values, and lists, "
        "tuples and dicts of these can be broadcast: make the ScheduledOptimizer before the optimizer has a state, and load "
        "the checkpoint after that, on all ranks"
    )


def _type_text(value: Any) -> str:
    return f"{_kind(value)} tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _adopt_state(optimizer: torch.optim.Optimizer, described: list[list[Any]], is_root: bool) -> list[torch.Tensor]:
    """Give the optimizer the described state, except on the root, which has it. Return its tensors, in the described order."""
    parameters = parameters_of(optimizer)
    if not is_root:
        optimizer.state.clear()
    tensors: list[torch.Tensor] = []
    for index, key, what in described:
        state: dict[Any, Any] = optimizer.state if index is None else optimizer.state[parameters[index]]
        if not is_root:
            state[key] = _make_value(what, parameters[index or 0])
        _collect_tensors(state[key], tensors)
    return tensors


def _make_value(what: list[Any], parameter: torch.Tensor) -> Any:
    kind, *rest = what
    if kind == "plain":
        return rest[0]
    if kind == "dict":
        return {name: _make_value(item, parameter) for name, item in rest[0]}
    if kind != "tensor":
        return {"list": list, "tuple": tuple}[kind](_make_value(item, parameter) for item in rest[0])
    shape, dtype, strides, beside = rest
    options: Any = {"dtype": getattr(torch, dtype), "device": parameter.device if beside else torch.device("cpu")}
    if strides is None:
        return torch.empty_like(parameter, requires_grad=False, **options)
    return torch.empty_strided(shape, strides, **options)


def _collect_tensors(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value.detach())
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _collect_tensors(item, into)


def _broadcast(session: commsched.Session, what: str, tensors: Sequence[torch.Tensor], root: int) -> None:
    """Broadcast the bytes of tensors in pieces of at most :data:`PIECE_BYTES`, so that the additional memory does not grow with
    the model."""
    total = sum(tensor.nbytes for tensor in tensors)
    piece = _Piece(session, what, min(total, PIECE_BYTES), root)
    with torch.no_grad():
        for tensor in tensors:
            contiguous = tensor.resolve_conj().resolve_neg().contiguous()  # the tensor itself, if it is contiguous
            values = _bytes_of(contiguous)
            while len(values) > 0:
                values = values[piece.add(values) :]
            if contiguous is not tensor and session.rank != root:
                piece.then(partial(tensor.copy_, contiguous))
        piece.send()


def _bytes_of(contiguous: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(contiguous) if contiguous.is_complex() else contiguous).reshape(-1).view(torch.uint8)


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both hold the same bytes."""
    if first.device.type != "cpu":
        return torch.equal(first, second)
    return bool((first.numpy() == second.numpy()).all())  # 10 times as fast as torch.equal


class _Piece:
    """Bytes of tensors that are broadcast together."""

    def __init__(self, session: commsched.Session, name: str, nbytes: int, root: int) -> None:
        self._session = session
        self._name = name
        self._root = root
        self._flat = torch.zeros(nbytes, dtype=torch.uint8, device=session.device)
        self._layer = None if session.device == "cpu" else open_device(session.device)
        self._filled = 0
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []  # bytes of a tensor, and their place in the buffer
        self._afterwards: list[Callable[[], object]] = []

    def add(self, values: torch.Tensor) -> int:
        """Add the first of ``values``, as many as there is space for, and return their number, at least one. A full buffer is
        sent first."""
        if self._filled == len(self._flat):
            self.send()
        count = min(len(values), len(self._flat) - self._filled)
        self._places.append((values[:count], self._flat[self._filled : self._filled + count]))
        self._filled += count
        return count

    def then(self, afterwards: Callable[[], object]) -> None:
        """Call ``afterwards`` on all ranks except the root, once the bytes added so far have arrived."""
        self._afterwards.append(afterwards)

    def send(self) -> None:
        """Broadcast the bytes added since the last call, if there are any."""
        if self._filled == 0:
            return
        flat = self._flat[: self._filled]
        if self._session.rank == self._root:
            for values, place in self._places:
                place.copy_(values)
        else:
            flat.zero_()
        if self._layer is None:
            self._session.broadcast(self._name, flat.numpy().data, self._root)
        else:
            torch.cuda.current_stream(flat.device).synchronize()
            self._session.broadcast(self._name, self._layer.view(flat), self._root, self._layer)
        if self._session.rank != self._root:
            for values, place in self._places:
                arrived = place.to(values.device)
                # Equal bytes are not written, so versions show which frozen parameters were others: see ``ElasticPart.keep``.
                if not _is_equal(values, arrived):
                    values.copy_(arrived)
            for afterwards in self._afterwards:
                afterwards()
        self._filled = 0
        self._places.clear()
        self._afterwards.clear()
