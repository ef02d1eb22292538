"""Detects torch.compile, because compiled code reads parameters without waiting for their update.

Compiled code uses the parameters' memory directly and does not call ``__torch_function__``. But torch compiles code when it is
first run, and again for tensors of another class, and it calls a function when a compilation begins. From then on, ``step()``
must leave no update outstanding. Compiled code then always finds parameters of their own class, and is not compiled again in
each step for guarded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch._compile import _disable_dynamo

from .guard import outside

_watchers: list[WeakMethod[Callable[[], None]]] = []


def watch_compiled(before_compiling: Callable[[], None]) -> None:
    """Call ``before_compiling`` in every thread that is about to compile code.

    It is a bound method, which is held weakly. It must not raise. It is not called for code that was compiled before; see
    :func:`was_seen`.
    """
    _watchers[:] = [watcher for watcher in _watchers if watcher() is not None]
    _watchers.append(WeakMethod(before_compiling))
    keep_watching()


def keep_watching() -> None:
    """Register with torch again, because ``torch._dynamo.reset()`` drops the registration."""
    import torch._dynamo.callback  # already imported by every optimizer of torch, so this takes no time

    callbacks = torch._dynamo.callback.callback_handler.start_callbacks
    if _begins not in callbacks:
        callbacks.append(_begins)


def was_seen() -> bool:
    """Whether anything was compiled in this process so far."""
    import torch._dynamo.utils

    return torch._dynamo.utils.counters["frames"]["total"] > 0


@_disable_dynamo  # if this function were compiled, it would wait for itself
def _begins(_: Any) -> None:
    with outside():
        for watcher in list(_watchers):
            before_compiling = watcher()
            if before_compiling is not None:
                before_compiling()
