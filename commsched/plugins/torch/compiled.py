"""Code that torch.compile makes reads parameters without asking for their update.

Compiled code takes the parameters' memory and goes through no ``__torch_function__`` when it runs. But it is made when it is
first run, and again for tensors of another class; torch says when that begins. From then on, ``step()`` must leave no update
outstanding: whatever is compiled finds parameters of their own class, and is not compiled again for others in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

from torch._compile import _disable_dynamo

from .outside import outside

_watchers: list[WeakMethod[Callable[[], None]]] = []


def watch(before_compiling: Callable[[], None]) -> None:
    """Call this bound method, which is held weakly, in every thread that is about to compile something.

    What was compiled before is not told, see :func:`was_seen`. It must not raise.
    """
    _watchers[:] = [watcher for watcher in _watchers if watcher() is not None]
    _watchers.append(WeakMethod(before_compiling))
    keep_watching()


def keep_watching() -> None:
    """``torch._dynamo.reset()`` forgets whom to call."""
    import torch._dynamo.callback  # every optimizer of torch has imported it: this takes no time

    callbacks = torch._dynamo.callback.callback_handler.start_callbacks
    if _begins not in callbacks:
        callbacks.append(_begins)


def was_seen() -> bool:
    """Whether anything was compiled in this process so far."""
    import torch._dynamo.utils

    return torch._dynamo.utils.counters["frames"]["total"] > 0


@_disable_dynamo  # compiling this, it would wait for itself
def _begins(_: Any) -> None:
    with outside():
        for watcher in list(_watchers):
            before_compiling = watcher()
            if before_compiling is not None:
                before_compiling()
