"""Forward spans of the trace, one for each module that has parameters of its own."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch

from ...core.ports import Observer


def trace_forward(model: torch.nn.Module, observer: Observer, forward_ended: Callable[[], None]) -> None:
    """Report each module's forward to ``observer``, and call ``forward_ended`` after each of them.

    Hooks stay on the model, so this is called only when a trace is wanted. Modules within modules are nested; the
    innermost is the one that has the parameters.
    """
    started: dict[int, float] = {}

    def before(module: torch.nn.Module, *_: Any) -> None:
        started[id(module)] = monotonic()

    def after(name: str) -> Callable[..., None]:
        def report(module: torch.nn.Module, *_: Any) -> None:
            observer.on_span("forward", name, started[id(module)], monotonic())
            forward_ended()

        return report

    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after(name or type(module).__name__))
