"""Ranks must have more in common than gradients, or weights diverge: the hyper-parameters of an update, the weights, and the
loss that a closure returns. This module compares the first two and averages the third."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch

import commsched

from ..common.step_flags import digest_of_record
from ..common.weights_check import WeightsCheck
from .device import Device
from .guard import own_class, unguarded
from .slot import Slot
from .update import is_of_torch

_Group = Mapping[str, Any]


def compared_keys(optimizer: torch.optim.Optimizer, groups: Iterable[_Group]) -> set[str]:
    """Return the keys of the hyper-parameters in ``groups`` that the update of ``optimizer`` can depend on.

    An optimizer of ``torch.optim`` reads only the entries that it has defaults for. Other numbers in its groups are compared,
    too, because hooks may read them; what else is there, such as a name, may differ between ranks. Any other optimizer may read
    every entry.
    """
    reads_all = not is_of_torch(optimizer)
    present = (key for group in groups for key, value in group.items() if reads_all or _is_number(value))
    return {*getattr(optimizer, "defaults", {}), *present} - {"params"}


class HyperParameters:
    """Makes digests of snapshots of an optimizer's groups. It processes only the groups that have changed, and of them only
    ``keys``. This set may grow; then it processes all groups anew."""

    def __init__(self, keys: Set[str]) -> None:
        self._keys = keys
        self._known_keys: frozenset[str] = frozenset()  # the keys that ``_texts`` was made with
        self._groups: list[_Group | None] = []  # the last snapshot; None: the group has a tensor, which is slow to compare
        self._texts: list[str] = []
        self._digest = 0.0

    def digest(self, groups: Sequence[_Group]) -> float:
        """Return the digest of ``groups``, which must be a snapshot: later changes must not modify it."""
        if self._known_keys != self._keys:
            self._known_keys = frozenset(self._keys)
            self._groups, self._texts = [], []
        known = len(self._groups)
        changed = [index for index, group in enumerate(groups) if index >= known or not _same(group, self._groups[index])]
        if changed or len(groups) != known:
            self._groups = [*self._groups[: len(groups)], *[None] * (len(groups) - known)]
            self._texts = [*self._texts[: len(groups)], *[""] * (len(groups) - known)]
            for index in changed:
                group = groups[index]
                self._groups[index] = None if any(map(_has_tensor, group.values())) else group
                self._texts[index] = json.dumps(
                    {key: _comparable(value) for key, value in group.items() if key in self._known_keys}, sort_keys=True
                )
            self._digest = digest_of_record(self._texts)
        return self._digest


def by_name(groups: Sequence[_Group], keys: Set[str]) -> dict[str, Any]:
    """Return each compared hyper-parameter by its name, as the JSON value that is compared."""
    return {
        f"param_groups[{index}]['{key}']": _comparable(value)
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key in keys
    }


def _same(group: _Group, known: _Group | None) -> bool:
    try:
        return known is not None and bool(group == known)
    except (RuntimeError, ValueError):  # PyTorch and numpy raise when tensors of several elements are compared by ==
        return False


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a number, or a container of numbers."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_number, value))
    if isinstance(value, dict):
        return bool(value) and all(map(_is_number, value.values()))
    return isinstance(value, bool | int | float | complex | torch.Tensor | np.ndarray | np.generic)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, torch.Tensor)


def _comparable(value: Any) -> Any:
    """Return JSON that is equal on two ranks if ``value`` has the same effect on the update.

    Numbers are compared by value, whatever their types. So are strings and members of an ``Enum``. Other objects are compared
    by their types, because nothing else of them is the same in two processes. A tensor on a device is compared by its type and
    kind of device only, because reading it would wait for the device; a difference shows in the comparison of weights.
    """
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return f"{value.dtype} on {value.device.type}"
        return _comparable(value.tolist())
    if isinstance(value, bool | int | float):
        return _number(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str | int | float | None) for key in value):
            return {str(key): _comparable(item) for key, item in value.items()}
        named = {key: _type_name(key) if isinstance(key, torch.Tensor) else _comparable(key) for key in value}
        return [[name, _comparable(value[key])] for key, name in named.items()]
    if isinstance(value, torch.dtype | torch.device | complex | bytes):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{_type_name(value)}.{value.name}"
    return _type_name(value)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _number(value: float) -> float | str:
    """Return ``value`` so that True, 1 and 1.0 are equal, and so are 0.0 and -0.0. Infinities and NaN become strings, because
    JSON has neither."""
    try:
        number = float(value) + 0.0
    except OverflowError:
        return str(value)
    return number if math.isfinite(number) else str(number)


class ComparedWeights:
    """Compares the parameters of one optimizer, including frozen ones, between ranks. Some steps compare a part of them
    (``plugins/common/weights_check.py``).

    Nothing waits for the comparison. ``slots`` are by flag; ``label`` names the optimizer in messages.
    """

    def __init__(self, session: commsched.Session, device: Device, slots: Sequence[Slot], label: str) -> None:
        self._device = device
        self._slots = slots
        with unguarded():
            nbytes = [slot.parameter.nbytes if _is_comparable(slot.parameter, device.name) else 0 for slot in slots]
        self._check = WeightsCheck(session, [slot.name for slot in slots], nbytes, f"weights{label}")
        self._is_wanted = False

    def compare(self, step: int) -> None:
        """Compare a part of the parameters, if this step does so.

        Call it in ``step()``, when all updates of earlier steps are done and none of this step is outstanding yet. Then no
        other thread waits for a parameter in order to write to it. Raises CommschedError if the job failed, or the session is
        closed.
        """
        if self._is_wanted:
            self._device.settle()  # wait for the digests of the last part, which was compared many steps ago
        self._is_wanted = self._check.begin(step)
        if not self._is_wanted:
            return
        with unguarded(), torch.inference_mode(False), torch.no_grad():
            for slot in self._slots:
                part = self._check.wanted(slot.flag)
                if part is not None:
                    values = slot.parameter.detach().resolve_conj().resolve_neg()
                    flat = values.reshape(-1).contiguous()  # a slice with a step stays one when it is flat
                    values = flat.view(torch.uint8)[slice(*part)]
                    self._device.digest(values, partial(self._check.add, slot.flag))


def _is_comparable(parameter: torch.Tensor, device: str) -> bool:
    """Whether ``parameter`` is plain dense numbers in the memory of ``device``."""
    own = own_class(parameter)
    is_plain = getattr(own, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
    return is_plain and parameter.layout == torch.strided and str(parameter.device) == device


def mean_loss(session: commsched.Session, loss: Any) -> Any:
    """Return the mean of ``loss`` over all ranks, if it is a number or a tensor of one element on all ranks. Otherwise return
    ``loss`` unchanged. Collective."""
    is_tensor = isinstance(loss, torch.Tensor) and loss.numel() == 1
    own = float(loss.detach() if is_tensor else loss).hex() if is_tensor or isinstance(loss, int | float) else None
    all_ranks = session.gather(own, "to average the loss of a closure")
    if None in all_ranks:
        return loss
    mean = sum(map(float.fromhex, all_ranks)) / len(all_ranks)
    return torch.full_like(loss.detach(), mean) if is_tensor else mean
