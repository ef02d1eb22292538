"""What is compared of the ranks' optimizers, and what is asked of them all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ...core.errors import ManifestMismatch, UnsupportedError

_SCALARS = (int, float, bool, str, np.generic)


def prepare(optimizer: mx.optimizer.Optimizer) -> None:
    """One update for each parameter: none waits for the average of another. (0, of an optimizer that knows no other, stays.)

    Raises:
        UnsupportedError: it is SGLD.
    """
    if isinstance(optimizer, mx.optimizer.SGLD):
        raise UnsupportedError("SGLD adds noise, which each rank would draw for itself: the ranks would part")
    optimizer.aggregate_num = min(1, optimizer.aggregate_num)


def describe(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Its class and the numbers it was made with, as JSON; ``rescale_grad`` is compared in each step."""
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
    """``described[r]``: of rank ``r``.

    Raises:
        ManifestMismatch: names what differs.
    """
    for rank, theirs in enumerate(described):
        for key in sorted(described[0].keys() | theirs.keys()):
            ours, other = described[0].get(key), theirs.get(key)
            if ours != other:
                raise ManifestMismatch(f"the optimizer has {key}={ours} on rank 0 but {key}={other} on rank {rank}")


def digest_numbers(optimizer: mx.optimizer.Optimizer) -> int:
    """Of what :func:`describe` gives, but for the learning rate, and of what each parameter's multiples of it are."""
    numbers = describe(optimizer)
    for key in ("lr", "lr_scheduler.base_lr"):  # compared by themselves
        numbers.pop(key, None)
    multiples = [
        [(float(parameter.lr_mult), float(parameter.wd_mult)) for parameter in optimizer.param_dict.values()],
        {str(key): float(value) for key, value in optimizer.lr_mult.items()},
        {str(key): float(value) for key, value in optimizer.wd_mult.items()},
    ]
    digest = hashlib.blake2b(json.dumps([numbers, multiples], sort_keys=True).encode(), digest_size=5)
    return int.from_bytes(digest.digest(), "big")


def digest_states(states: Mapping[Any, Any]) -> int:
    """Of an updater's states, as far as they are arrays and numbers: what pickle makes of equal ones may differ."""
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
