"""Hooks around ``step()``: which of them run, and when."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from .narrow import updates_each_parameter_alone

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def with_own_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """As ``Optimizer.profile_hook_step``, without the hooks that are registered for all optimizers: they run around the
    user's, which it calls."""

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
    """Whether ``optimizer.step()`` is torch's own code and nothing else: no hook or wrapper, which might read the model or
    count its calls. That of learning-rate schedulers does neither."""
    return (
        updates_each_parameter_alone(optimizer)
        and _is_step_of_class(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )


def _is_step_of_class(optimizer: torch.optim.Optimizer) -> bool:
    step = vars(optimizer).get("step")
    return step is None or (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step)


@contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, its ``step()`` is that of its class: what is around it came after the ``step()`` whose update is made."""
    own = vars(optimizer)
    put_around = {name: own.pop(name) for name in ("step", *_HOOKS) if name in own}
    own.update({name: OrderedDict() for name in _HOOKS})
    try:
        yield
    finally:
        own.update(put_around)
