"""Finds out which backward runs in this thread, by ways that torch does not document."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction

from .guard import unguarded

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
