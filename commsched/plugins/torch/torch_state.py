"""Finds out what torch is doing, by ways that it does not document: which backward runs in this thread, when code is compiled.

Compiled code reads parameters without waiting for their update: it uses their memory directly and does not call
``__torch_function__``. But torch compiles code when it is first run, and again for tensors of another class, and it calls a
function when a compilation begins. From then on, ``step()`` must leave no update outstanding. Compiled code then always finds
parameters of their own class, and is not compiled again in each step for guarded ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import BackwardCFunction

from .guard import outside, unguarded

#: The number of the running backward; -1 if none runs.
current_task: Callable[[], int] = torch._C._current_graph_task_id

#: Whether the running backward keeps its graph (``retain_graph``).
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

#: Queues a function that the running backward calls when it has ended without an error, before it returns to its caller.
at_end: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def is_nested() -> bool:
    """Whether the backward of this thread was called within another backward, as in reentrant checkpointing."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is _FUNCTION_BACKWARD:
            return True
    return False


_FUNCTION_BACKWARD = BackwardCFunction.apply.__code__


def adds_to_grad(parameter: torch.Tensor) -> bool:
    """Whether the running backward adds to ``parameter.grad``; ``torch.autograd.grad`` returns the gradient instead. Call it
    only within hooks of the backward."""
    with unguarded():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "running autograd.grad()" not in str(error):
            raise
        return False


_watchers: list[WeakMethod[Callable[[], None]]] = []


def watch_compiled(before_compiling: Callable[[], None]) -> None:
    """Call ``before_compiling`` in every thread that is about to compile code.

    It is a bound method, which is held weakly. It must not raise. It is not called for code that was compiled before; see
    :func:`has_compiled`.
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


def has_compiled() -> bool:
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
