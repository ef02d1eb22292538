"""Outstanding updates run where a reader happens to be: what surrounds the reader must not see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def is_surrounded() -> bool:
    """Whether this thread is within something that records, replaces or transforms operations."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    )


@contextmanager
def outside() -> Iterator[None]:
    """For this thread, leave what records, replaces or transforms operations: a trace of ``torch.jit``, dispatch modes such as
    those of ``make_fx`` and of fake tensors, transforms of ``torch.func``, and what the optimizers of torch do otherwise while
    something is being compiled."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    tracer: Any = torch._C
    compiler: Any = torch.compiler
    tracing, compiling = tracer._get_tracing_state(), compiler._is_compiling_flag
    with ExitStack() as stack:
        stack.callback(tracer._set_tracing_state, tracing)
        tracer._set_tracing_state(None)
        stack.callback(setattr, compiler, "_is_compiling_flag", compiling)
        compiler._is_compiling_flag = False
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        yield
