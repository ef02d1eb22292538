"""The numbers of an optimizer that are compared between ranks, and the requirements on every optimizer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ...core.comparison import require_same
from ...core.errors import UnsupportedError

_SCALARS = (int, float, bool, str, np.generic)


def prepare_optimizer(optimizer: mx.optimizer.Optimizer) -> None:
    """Make ``optimizer`` update each parameter separately, so that no update waits for the average of another parameter.

    An ``aggregate_num`` of 0 stays: such an optimizer cannot aggregate.

    Raises:
        UnsupportedError: the optimizer is SGLD.
    """
    if isinstance(optimizer, mx.optimizer.SGLD):
        raise UnsupportedError("SGLD adds noise, which each rank would draw for itself: ranks would diverge")
    optimizer.aggregate_num = min(1, optimizer.aggregate_num)


def describe_optimizer(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return the class and the numbers of ``optimizer`` and of its scheduler, as JSON.

    ``rescale_grad`` is left out, because it is compared in each step.
    """
    numbers = _scalars(optimizer)
    numbers.pop("rescale_grad", None)
    scheduler = optimizer.lr_scheduler
    if scheduler is not None:
        numbers |= {f"lr_scheduler.{key}": value for key, value in _scalars(scheduler).items()}
        numbers["lr_scheduler"] = type(scheduler).__name__
    return {"class": type(optimizer).__name__, **numbers}


def _scalars(of: Any) -> dict[str, Any]:
    found = {key: value for key, value in getattr(of, "__dict__", {}).items() if isinstance(value, _SCALARS)}
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in found.items()}


def require_equal_optimizers(described: Sequence[Mapping[str, Any]]) -> None:
    """Require equal optimizers on all ranks. ``described[r]`` is the description of rank ``r``, see :func:`describe_optimizer`.

    Raises:
        ManifestMismatch: the class or a number differs. Names it.
    """
    require_same(described, lambda different: f"the optimizer's {different.key} is {different.text()}")


def numbers_of(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return all numbers that affect an update: those of :func:`describe_optimizer`, ``rescale_grad``, learning
    rate and multipliers."""
    numbers = {
        "learning_rate": float(optimizer.learning_rate),
        "rescale_grad (of the batch size)": float(optimizer.rescale_grad),
    }
    numbers |= describe_optimizer(optimizer)
    for key in ("lr", "lr_scheduler.base_lr"):  # the learning rate contains them
        numbers.pop(key, None)
    for parameter in optimizer.param_dict.values():
        numbers[f"lr_mult of {parameter.name}"] = float(parameter.lr_mult)
        numbers[f"wd_mult of {parameter.name}"] = float(parameter.wd_mult)
    numbers |= {f"lr_mult of key {key}": float(value) for key, value in optimizer.lr_mult.items()}
    numbers |= {f"wd_mult of key {key}": float(value) for key, value in optimizer.wd_mult.items()}
    return numbers


def digest_states(states: Mapping[Any, Any]) -> int:
    """Return a digest of the arrays and numbers in an updater's states. The pickles of equal states may differ."""
    digest = hashlib.blake2b(digest_size=5)

    def add(state: Any) -> None:
        if isinstance(state, (tuple, list)):
            for each in state:
                add(each)
        elif isinstance(state, Mapping):
            for key in sorted(state, key=str):
                digest.update(f"{key} ".encode())
                add(state[key])
        elif isinstance(state, (mx.nd.NDArray, np.ndarray)):
            digest.update((state.asnumpy() if isinstance(state, mx.nd.NDArray) else state).tobytes())
        elif isinstance(state, _SCALARS):
            digest.update(f"{state} ".encode())

    for index in sorted(states, key=str):
        digest.update(f"{index} ".encode())
        add(states[index])
    return int.from_bytes(digest.digest(), "big")
