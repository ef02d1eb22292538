"""Runs the user's optimizer for some of its parameters, with their averages in ``.grad``."""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...core.errors import UnsupportedError
from .guard import unguarded
from .slot import Slot


class SwappedIn(NamedTuple):
    """A gradient that is swapped into the ``.grad`` of one parameter during the update."""

    slot: Slot
    before: torch.Tensor | None  # the parameter's ``.grad`` before the swap
    gradient: torch.Tensor  # the tensor swapped in: the slot's gradient, or a copy with the parameter's strides
    version: int  # version of ``gradient`` at the swap; shows whether the optimizer has written to a copy


def swap_in(slots: Sequence[Slot]) -> list[SwappedIn]:
    """Swap the averages, which must be complete, into ``.grad``. Raises UnsupportedError if the user has moved their memory;
    then no ``.grad`` is changed."""
    with unguarded(), torch.inference_mode(False), torch.no_grad():
        for slot in slots:
            slot.require_in_buffer()
        swapped = []
        for slot in slots:
            gradient = _strided_like(slot.parameter, slot)
            swapped.append(SwappedIn(slot, slot.parameter.grad, gradient, gradient._version))
            slot.parameter.grad = gradient
        return swapped


def _strided_like(parameter: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the average with the strides of ``parameter``; a copy if the strides differ.

    Fused optimizers traverse parameter and gradient in memory order, because autograd makes gradients with the strides of
    their parameters. The flat buffer, however, is contiguous.
    """
    if slot.rows is not None or slot.view.stride() == parameter.stride():
        return slot.gradient
    return torch.empty_like(parameter).copy_(slot.view)


def swap_out(swapped: Sequence[SwappedIn]) -> None:
    """Restore each ``.grad`` to its value before :func:`swap_in`, unless the optimizer replaced it.

    On a rank that did not use the parameter, that value is None.
    """
    with unguarded(), torch.inference_mode(False), torch.no_grad():
        for each in swapped:
            slot, now = each.slot, each.slot.parameter.grad
            if each.gradient is not slot.gradient and each.gradient._version != each.version:
                slot.gradient.copy_(each.gradient)
            if now is each.gradient:
                slot.parameter.grad = each.before


#: As ``SwappedIn``, with the slot's gradient as the second item. A plain tuple, because each step makes one for each parameter.
_SwappedIntoTwin = tuple[Slot, torch.Tensor, torch.Tensor, int]


def swap_into_twins(slots: Sequence[Slot], keep: bool) -> list[_SwappedIntoTwin]:
    """Put the averages, which must be complete, into ``.grad`` of the twins, as objects that user code does not hold. Raises as
    :func:`swap_in`. Return what :func:`swap_out_of_twins` has to undo.

    ``keep`` says that the optimizer leaves ``.grad`` as it is. Then the averages may stay there for the next updates.
    """
    with unguarded(), torch.inference_mode(False), torch.no_grad():
        to_swap = []
        for slot in slots:
            if slot.rows is None and slot.gradient.data_ptr() != slot.address:
                slot.require_in_buffer()
            if not (keep and slot.twin.keeps_average):  # in the usual case it stays there
                to_swap.append(slot)
        swapped = []
        for slot in to_swap:
            twin = slot.twin
            if slot.rows is not None:
                gradient = slot.gradient.detach()
            elif twin.stride == slot.stride:
                gradient = twin.another_of(slot.view)
                twin.keeps_average = keep
            else:
                gradient = _strided_like(twin.tensor, slot)
            twin.tensor.grad = gradient
            if not twin.keeps_average:
                swapped.append((slot, slot.gradient, gradient, gradient._version))
        return swapped


def swap_out_of_twins(swapped: Sequence[_SwappedIntoTwin]) -> None:
    """Clear ``.grad`` of the twins. If the optimizer replaced it there, the replacement becomes the parameter's ``.grad``,
    unless the user has assigned to that since ``step()`` or asked for zeros."""
    if not swapped:
        return
    with unguarded(), torch.inference_mode(False), torch.no_grad():
        for slot, before, gradient, version in swapped:
            twin = slot.twin.tensor
            left, twin.grad = twin.grad, None
            elsewhere = slot.rows is None and gradient.data_ptr() != slot.address
            if elsewhere and (slot.twin.has_moved(gradient) or gradient._version != version):
                slot.view.copy_(gradient)
            if left is not gradient and slot.parameter.grad is before and not slot.zero_later:
                slot.parameter.grad = left


def take_values_of_moved_twins(slots: Sequence[Slot]) -> None:
    """Copy the values of each twin that the optimizer has given other memory, through ``.data``, to its parameter's memory. The
    twin gets that memory back. Raises UnsupportedError if the values do not fit the parameter."""
    with unguarded(), torch.inference_mode(False), torch.no_grad():
        for slot in slots:
            if not slot.twin.take_values():
                raise UnsupportedError(
                    f"the optimizer has given parameter '{slot.name}' another shape or type through .data: per_parameter=True "
                    "cannot be used with it"
                )


def with_own_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """As ``Optimizer.profile_hook_step``, but without the hooks that are registered for all optimizers: those already run
    around the ``step()`` of the user's optimizer."""

    @functools.wraps(step)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
            for before in list(optimizer._optimizer_step_pre_hooks.values()):
                replaced = before(optimizer, args, kwargs)
                if replaced is not None:
                    args, kwargs = replaced
            result = step(*args, **kwargs)
            for after in list(optimizer._optimizer_step_post_hooks.values()):
                after(optimizer, args, kwargs)
            return result

    return hooked


def runs_only_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` runs torch's own code only, without hooks or wrappers, which might read the model or count
    calls. The wrapper of learning-rate schedulers is allowed, because it does neither."""
    return (
        is_of_torch(optimizer)
        and is_step_of_class(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )


def is_step_of_class(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step`` is the method of its class, or that method in the wrapper of learning-rate schedulers."""
    step = vars(optimizer).get("step")
    return step is None or (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step)


#: Attributes of an optimizer that hold the hooks that run before and after its step().
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class of ``optimizer`` is one of ``torch.optim``. Their ``step()`` for all parameters equals several calls,
    each for some of them. Others may keep counters in their groups or use a norm over all gradients, so for them the whole
    update is one call, which needs all averages."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def takes_eps_of_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` for some parameters would differ: Adafactor whose ``eps`` was not set takes it, for all of a
    group, from the type of the first parameter that it updates, and a group has several types."""
    return isinstance(optimizer, torch.optim.Adafactor) and any(
        group["eps"][0] is None and len({parameter.dtype for parameter in group["params"]}) > 1
        for group in optimizer.param_groups
    )


def require_supported(optimizer: torch.optim.Optimizer) -> None:
    """Require an optimizer that does not evaluate the model several times per step. Raises UnsupportedError if ``optimizer``
    does (LBFGS)."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError("LBFGS is not supported: it runs backward several times within one step")


def snapshot(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the current hyper-parameters of every group. Tensors and containers are copied."""
    return [{key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (tuple, list):
        return type(value)(_copy(item) for item in value)
    return {key: _copy(item) for key, item in value.items()} if type(value) is dict else value


#: Attributes that the copy in :func:`step_some` does not share with the optimizer: its groups, its state, and the wrappers
#: and hooks of its step().
_ITS_OWN = ("param_groups", "state", "step", *STEP_HOOKS)


#: Optimizers and types of torch for which operations on lists of tensors, on the CPU, give the same bits as those on one tensor
#: at a time. Types of 16 bits and complex ones are rounded differently. These optimizers write to no gradient either.
_ALIKE_BY_LISTS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_ALIKE_TYPES = (torch.float32, torch.float64)

#: The size up to which parameters are updated by lists: a call of torch takes longer than the work on so few bytes.
_MAX_BYTES_BY_LISTS = 4096


def _may_use_lists(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether small parameters on the CPU, with the hyper-parameters ``group``, may be updated with ``foreach=True``: the user
    has not chosen an implementation, and the result is the same bit for bit."""
    values = [each for value in group.values() for each in (value if isinstance(value, tuple | list) else (value,))]
    return (
        type(optimizer) in _ALIKE_BY_LISTS
        and group.get("foreach", False) is None
        and not any(group.get(key) for key in ("fused", "differentiable", "capturable", "nesterov"))
        and not any(isinstance(value, torch.Tensor) for value in values)
    )


def own_tensors(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer copies of the tensors in its state, but for views, which an optimizer may use as parts of a whole."""
    times = Counter(_ids_in(list(optimizer.state.values())))
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor that is there twice stays one

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, torch.nn.Parameter) or value._is_view():  # a parameter of a model, maybe
                return value
            if times[id(value)] == 1:
                return value.clone()
            return shared.setdefault(id(value), (value, value.clone()))[1]
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = own(item)
        elif type(value) in (tuple, list):
            return type(value)(map(own, value))
        return value

    with torch.no_grad():
        for key, state in optimizer.state.items():
            optimizer.state[key] = own(state)


def _ids_in(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield id(value)
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _ids_in(item)


def can_be_narrowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` keeps its groups and its state in its own attributes, as the optimizers of torch do."""
    return "param_groups" in vars(optimizer) and "state" in vars(optimizer)


def step_some(
    optimizer: torch.optim.Optimizer,
    hyper_parameters: list[dict[str, Any]],
    slots: Sequence[Slot],
    hooks: bool,
    plain: bool,
) -> None:
    """Run ``optimizer.step()`` for some parameters only.

    It may be called wherever a parameter is read, and while another thread uses ``optimizer``. Therefore a copy of the
    optimizer makes the step. The copy has its own groups, which contain the twins, and looks up the state of their parameters
    in the state of ``optimizer``. The step runs outside inference and autocast mode.

    Args:
        hyper_parameters: the hyper-parameters of each group.
        slots: the parameters to update. The ``.grad`` of each twin is the average.
        hooks: whether the hooks of ``optimizer`` are called, with the copy.
        plain: whether only torch's own code runs, on parameters of torch's own class.
    """
    if not slots:
        return
    is_on_cpu = slots[0].device.type == "cpu"  # all parameters are on one device: see device_of
    by_lists = [plain and is_on_cpu and _may_use_lists(optimizer, group) for group in hyper_parameters]
    has_momentum = [isinstance(optimizer, torch.optim.SGD) and bool(group.get("momentum")) for group in hyper_parameters]
    by_group: dict[tuple[int | bool, ...], list[torch.Tensor]] = {}
    parameter_of: dict[int, torch.Tensor] = {}  # by the id of its twin
    for slot in slots:
        twin, tensor, index = slot.twin, slot.twin.tensor, slot.param_group
        # Properties of the parameter alone: which ones are updated together differs between ranks. Torch updates all parameters
        # of a call one by one, which may round differently, if one of them has a sparse gradient, or no momentum of SGD yet, or
        # (on a GPU) a class of its own.
        is_sparse, has_own_class = slot.rows is not None, type(tensor) is not torch.nn.Parameter
        is_first = has_momentum[index] and optimizer.state.get(slot.parameter, {}).get("momentum_buffer") is None
        by_list = by_lists[index] and twin.nbytes <= _MAX_BYTES_BY_LISTS and not is_sparse and tensor.dtype in _ALIKE_TYPES
        kind = index, by_list, is_sparse, has_own_class, is_first
        by_group.setdefault(kind, []).append(tensor)
        parameter_of[id(tensor)] = slot.parameter
    kinds = sorted(by_group)
    groups = [
        {**hyper_parameters[kind[0]], "params": by_group[kind], **({"foreach": True} if kind[1] else {})} for kind in kinds
    ]
    attributes = {name: value for name, value in vars(optimizer).items() if name not in _ITS_OWN}
    copied: Any = object.__new__(type(optimizer))
    vars(copied).update(attributes, param_groups=groups, state=_StateOfTwins(optimizer.state, parameter_of))
    for name in STEP_HOOKS:
        setattr(copied, name, vars(optimizer)[name] if hooks else OrderedDict())
    looks = _LookAtGroups(optimizer, groups, [kind[0] for kind in kinds]) if not is_of_torch(optimizer) else None
    if looks is not None:
        looks.begin_within_hooks_of(copied)
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(slots[0].device.type, enabled=False):
            copied.step()
        if looks is not None:
            looks.end()
    finally:
        for name, value in vars(copied).items():
            if name not in _ITS_OWN and (name not in attributes or attributes[name] is not value):
                setattr(optimizer, name, value)  # step() has changed it: a counter, say


class _LookAtGroups:
    """Looks at ``groups`` before and after ``step()`` of a copy of ``optimizer``, of which the groups are with these
    ``indices``. New values are given to the optimizer. A value that is changed is one of all parameters, and would be lost."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._indices = indices
        self._is_over = False
        self._begin()

    def _begin(self, *_: Any) -> None:
        self._before = [{key: _copy(value) for key, value in group.items() if key != "params"} for group in self._groups]

    def begin_within_hooks_of(self, copied: Any) -> None:
        """Look after the hooks that run before ``step()``, and before those that run after it: they may set what they like."""
        before, after = (vars(copied)[name] for name in STEP_HOOKS)
        if before or after:
            vars(copied).update(zip(STEP_HOOKS, (OrderedDict(before), OrderedDict({-1: self.end, **after}))))
            vars(copied)[STEP_HOOKS[0]][-1] = self._begin

    def end(self, *_: Any) -> None:
        """Raise UnsupportedError if ``step()`` has changed a value."""
        if self._is_over:
            return
        self._is_over = True
        for group, before, index in zip(self._groups, self._before, self._indices):
            for key in (each for each in group if each not in before and each != "params"):
                self._optimizer.param_groups[index].setdefault(key, group[key])
            for key in (each for each in before if each in group):
                if not _is_same(group[key], before[key]):
                    raise UnsupportedError(
                        f"the optimizer's step() has changed '{key}' in param_groups, which is common to all parameters: "
                        "per_parameter=True cannot be used with it"
                    )


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        is_like = (value.shape, value.dtype, value.device) == (other.shape, other.dtype, other.device)
        return is_like and bool(((value == other) | ((value != value) & (other != other))).all())  # NaN is the same as NaN
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_same(value[key], other[key]) for key in value)
    try:
        return value is other or bool(value == other)
    except (RuntimeError, ValueError):  # arrays have no single answer
        return False


class _StateOfTwins(MutableMapping[Any, Any]):
    """The state of the user's optimizer; a twin as key finds the state of its parameter."""

    __slots__ = ("_found", "_parameter_of", "_state")

    def __init__(self, state: Any, parameter_of: Mapping[int, torch.Tensor]) -> None:
        self._state = state
        self._parameter_of = parameter_of
        self._found: dict[int, Any] = {}  # state by id of the twin: each step looks it up twice

    def _key(self, key: Any) -> Any:
        return self._parameter_of.get(id(key), key)

    def __getitem__(self, key: Any) -> Any:
        number = id(key)
        found = self._found.get(number)
        if found is None:
            parameter = self._parameter_of.get(number)
            if parameter is None:
                return self._state[key]
            found = self._found[number] = self._state[parameter]
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._found.clear()  # also if ``key`` is the parameter itself
        self._state[self._key(key)] = value

    def __delitem__(self, key: Any) -> None:
        self._found.clear()  # also if ``key`` is the parameter itself
        del self._state[self._key(key)]

    def __contains__(self, key: object) -> bool:
        return self._key(key) in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)
