"""How long each layer of a torch model takes, forward and backward, measured in training without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class LayerTimes:
    """In order of use in forward: name, forward and backward seconds, and bytes of gradients of each layer; medians."""

    names: list[str]
    forward_seconds: list[float]
    backward_seconds: list[float]
    nbytes: list[int]


class LayerTimer:
    """Times the modules of ``model`` that have parameters of their own, each used once per forward.

    A layer's forward lasts until the next layer's begins, and its backward from the gradients of the layer behind it to its
    own, so that what lies between layers is counted. The optimizer's time is shared out by bytes: it delays the next forward.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [
            (name or "model", module)
            for name, module in model.named_modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        self._forward_at: dict[str, float] = {}
        self._gradient_at: dict[str, float] = {}
        self._steps: list[tuple[list[str], list[float], list[float]]] = []
        for name, module in self._layers:
            module.register_forward_pre_hook(self._mark(self._forward_at, name))
            for parameter in module.parameters(recurse=False):
                parameter.register_post_accumulate_grad_hook(self._mark(self._gradient_at, name))

    def _mark(self, times: dict[str, float], name: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            times[name] = perf_counter()

        return mark

    def step(self, forward_ended: float, backward_ended: float, update_ended: float) -> None:
        """The moments, of ``perf_counter``, at which the phases of a training step ended."""
        names = sorted(self._forward_at, key=self._forward_at.__getitem__)
        begins = [self._forward_at[name] for name in names]
        forward = [after - before for before, after in zip(begins, [*begins[1:], forward_ended])]
        ready = [self._gradient_at[name] for name in names]
        backward = [after - before for after, before in zip(ready, [*ready[1:], forward_ended])]
        sizes = self._sizes(names)
        update = update_ended - backward_ended
        forward = [seconds + update * size / sum(sizes) for seconds, size in zip(forward, sizes)]
        self._steps.append((names, forward, backward))

    def _sizes(self, names: Sequence[str]) -> list[int]:
        modules = dict(self._layers)
        return [sum(p.numel() * p.element_size() for p in modules[name].parameters(recurse=False)) for name in names]

    def result(self, warm_up: int) -> LayerTimes:
        """Medians over the steps after the first ``warm_up``."""
        steps = self._steps[warm_up:]
        names = steps[0][0]
        forward, backward = ([median(layer) for layer in zip(*(step[part] for step in steps))] for part in (1, 2))
        return LayerTimes(names, forward, backward, self._sizes(names))
