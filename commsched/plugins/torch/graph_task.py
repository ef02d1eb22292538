"""The backward that runs in this thread."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .guard import unguarded

#: Whether it was told to keep its graph.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

#: Has it call a function when it is through without an error, before it returns to who called it.
at_end: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def adds_to_grad(parameter: torch.Tensor) -> bool:
    """Whether it will add to ``parameter.grad``: ``torch.autograd.grad`` returns the gradient instead. For hooks of it."""
    with unguarded():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "running autograd.grad()" not in str(error):
            raise
        return False
