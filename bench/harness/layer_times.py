"""Forward and backward times of each layer of a torch model, measured in training without communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import torch

from .measure import LayerTimes


@dataclass(frozen=True)
class ParameterLayer:
    """A module and its own parameters that get a gradient, except parameters that a module used earlier has too.

    ``module_name`` is the name from ``named_modules``, which is empty for the model itself.
    """

    module_name: str
    parameters: tuple[torch.nn.Parameter, ...]

    @property
    def name(self) -> str:
        return self.module_name or "model"

    @property
    def tensors(self) -> list[int]:
        """Bytes of each parameter."""
        return [parameter.nbytes for parameter in self.parameters]

    @property
    def nbytes(self) -> int:
        return sum(self.tensors)


def parameter_layers(modules: Sequence[tuple[str, torch.nn.Module]]) -> list[ParameterLayer]:
    """Make a layer of each module. ``modules`` are named and in order of first use. A tied parameter belongs to the layer that
    uses it first."""
    seen: set[int] = set()
    layers = []
    for name, module in modules:
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        layers.append(ParameterLayer(name, tuple(own)))
    return layers


class Clock(Protocol):
    """A clock. ``now`` returns a moment of any type. ``seconds`` converts the moments of one step, of which the first is the
    earliest, to comparable seconds."""

    def now(self) -> Any: ...

    def seconds(self, moments: Sequence[Any]) -> list[float]: ...


class WallClock:
    """A clock whose moments are from ``perf_counter``."""

    def now(self) -> float:
        return perf_counter()

    def seconds(self, moments: Sequence[float]) -> list[float]:
        return list(moments)


class CudaClock:
    """A clock whose moments are events in the current stream: the times at which the GPU reaches them, not the times at which
    work was submitted."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moments: Sequence[torch.cuda.Event]) -> list[float]:
        torch.cuda.synchronize()
        return [moments[0].elapsed_time(moment) / 1000 for moment in moments]


def clock_of(device: torch.device | str) -> Clock:
    """The clock of the computation on ``device``."""
    return CudaClock() if torch.device(device).type == "cuda" else WallClock()


class LayerTimer:
    """Times the modules of ``model`` that have parameters of their own.

    A layer's forward lasts until the first use of the next layer. Its backward lasts from the gradients of the layer behind it
    to the last of its own gradients. Time between layers therefore counts for the layer in front; this includes a tied head,
    which has no gradient of its own. This changes neither the time at which a gradient can exist nor the work that is left
    after a layer, and therefore no bound. The optimizer's time is divided among layers by bytes and added to forward, because
    it delays the next forward.
    """

    def __init__(self, model: torch.nn.Module, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._modules = dict(model.named_modules())
        self._forward_at: dict[str, Any] = {}  # in order of first use
        self._gradient_at: dict[int, Any] = {}  # by id of parameter
        self._order: list[str] = []
        self._layers: list[ParameterLayer] = []
        self._steps: list[tuple[list[float], list[float]]] = []
        model.register_forward_pre_hook(self._begin)
        for name, module in self._modules.items():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(self._use_of(name))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _begin(self, *_: Any) -> None:
        self._forward_at.clear()
        self._gradient_at.clear()

    def _use_of(self, name: str) -> Callable[..., None]:
        def use(*_: Any) -> None:
            if name not in self._forward_at:
                self._forward_at[name] = self._clock.now()

        return use

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._gradient_at[id(parameter)] = self._clock.now()

    @property
    def layers(self) -> list[ParameterLayer]:
        """The layers of the result; empty before the first step."""
        return list(self._layers)

    def step(self, forward_ended: Any, backward_ended: Any, update_ended: Any) -> None:
        """Record a training step. The arguments are the moments at which its phases ended, from the timer's clock (by default
        ``perf_counter``).

        Raises:
            ValueError: the step used other layers than the first step or used them in another order, or a parameter got no
                gradient.
        """
        self._know_layers()
        begins = [self._forward_at[layer.module_name] for layer in self._layers]
        gradients = [self._gradient_at[id(parameter)] for layer in self._layers for parameter in layer.parameters]
        moments = self._clock.seconds([*begins, forward_ended, backward_ended, update_ended, *gradients])
        starts, (forward_end, backward_end, update_end) = moments[: len(begins)], moments[len(begins) :][:3]
        forward = [after - before for before, after in pairwise([*starts, forward_end])]
        update = (update_end - backward_end) / sum(layer.nbytes for layer in self._layers)
        forward = [seconds + update * layer.nbytes for seconds, layer in zip(forward, self._layers)]
        self._steps.append((forward, self._backward(moments[len(begins) + 3 :], forward_end)))

    def _know_layers(self) -> None:
        order = list(self._forward_at)
        if not self._layers:
            layers = parameter_layers([(name, self._modules[name]) for name in order])
            self._order, self._layers = order, [layer for layer in layers if layer.parameters]
        if order != self._order:
            raise ValueError(f"layers were used in the order {order}, and in the first step in {self._order}")
        if not order:
            raise ValueError("no layer with parameters was used in this step")
        for layer in self._layers:
            if any(id(parameter) not in self._gradient_at for parameter in layer.parameters):
                raise ValueError(f"layer '{layer.name}' has a parameter that got no gradient in this step")

    def _backward(self, gradient_at: Sequence[float], forward_ended: float) -> list[float]:
        left = iter(gradient_at)
        own = [max(next(left) for _ in layer.parameters) for layer in self._layers]
        # A gradient that came before the gradient of a layer behind it took no time of its own.
        ready = list(accumulate(reversed(own), max, initial=forward_ended))
        return [after - before for before, after in pairwise(ready)][::-1]

    def result(self, warm_up: int) -> LayerTimes:
        """Medians over the steps after the first ``warm_up``. The layers of forward add up to the median of their sums, and so
        do those of backward.

        Raises:
            ValueError: there are no such steps.
        """
        steps = self._steps[warm_up:]
        if not steps:
            raise ValueError(f"{len(self._steps)} steps were timed, and {warm_up} of them are for warming up")
        forward, backward = map(_medians, zip(*steps))
        names, nbytes, tensors = zip(*((layer.name, layer.nbytes, layer.tensors) for layer in self._layers))
        return LayerTimes(list(names), forward, backward, list(nbytes), list(tensors))


def _medians(steps: Sequence[Sequence[float]]) -> list[float]:
    """The median of each layer over ``steps``, scaled to the median of the sums: a noise that hits another layer in each step
    is in no layer's median."""
    layers = [median(layer) for layer in zip(*steps)]
    scale = median(map(sum, steps)) / (sum(layers) or 1.0)
    return [scale * layer for layer in layers]
