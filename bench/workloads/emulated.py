"""EMULATED models: the autograd graph, parameters and gradients of a profile, whose layers sleep for the time a GPU would take.

Gradients are real float32 tensors. They depend on the parameter, the rank and the step, and, through the numbers that
forward passes from layer to layer, on the weights that forward read: who reads a stale weight gets other numbers than
plain training. What it costs the processor is one multiplication per element of gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from commsched.simulator.profile import Layer, Profile

#: So many different places of the shared random numbers at which a parameter's pattern can begin.
_OFFSETS = 4096
_STRIDE = 997  # from one parameter's to the next; coprime to _OFFSETS
#: All layers together change what passes through them by at most a factor of exp(+-_FEEDBACK): nothing runs away.
_FEEDBACK = 1.5
#: Radians of a gain's phase for each unit that weights have moved along their patterns; a step moves them by some 0.01.
_PHASE = 64.0
#: Two layers in three push one way and one the other. Were they all alike, the next steps would make up for most of what one
#: stale layer changed; were they to cancel, nobody would see that all layers are stale.
_SIGNS = (1, 1, -1)
_INITIAL_SCALE = 0.1
#: Who takes longer to read a layer's parameters has waited for them, or updated them.
_READING_SECONDS = 200e-6


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, never going back."""
        ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


class Device:
    """The GPU that is emulated: it works through its layers, and does not stop when the host wakes up late.

    What a layer took too long (a sleep that lasted longer, results that took longer to make) is taken off the next ones, as
    long as nothing was waited for in between.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late_seconds = 0.0

    def idle(self) -> None:
        """It has run dry: the next layer begins when it is asked for."""
        self._late_seconds = 0.0

    def now(self) -> float:
        return self._clock.now()

    def begin(self) -> float:
        """When the layer that the host begins now began on the device."""
        return self._clock.now() - self._late_seconds

    def end(self, began: float, seconds: float) -> None:
        """Sleep until the layer has lasted ``seconds``."""
        ends = began + seconds
        left = ends - self._clock.now()
        if seconds > 0 and left > 0:
            self._clock.sleep(left)
        self._late_seconds = max(0.0, self._clock.now() - ends)


@dataclass(frozen=True)
class EmulatedWorkload:
    """A workload made from a profile, whose times are kept as they are."""

    profile: Profile
    emulated = True

    def make_model(self) -> EmulatedModel:
        return EmulatedModel(self.profile)

    def loss(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        batch = torch.tensor(batch_value(step, rank), dtype=torch.float64, requires_grad=True)
        loss: torch.Tensor = model(batch)
        return loss

    def untimed(self) -> EmulatedWorkload:
        layers = tuple(replace(layer, forward_seconds=0.0, backward_seconds=0.0) for layer in self.profile.layers)
        return replace(self, profile=replace(self.profile, layers=layers))


def batch_value(step: int, rank: int) -> float:
    """The number that stands for a rank's batch. It changes sign over steps, so that weights stay bounded, and the average
    over ranks is never zero in all steps nor equal to any one rank's."""
    return (1 + 0.5 * math.cos(2.9 * rank + 0.3 * step)) * math.cos(1.7 * step)


class EmulatedModel(nn.Module):
    """A chain of the profile's layers, each a module of its layer's name. A number goes in, and the loss comes out.

    Raises:
        ValueError: two layers have one name, or a name cannot be a module's.
    """

    def __init__(self, profile: Profile, clock: Clock | None = None) -> None:
        super().__init__()
        self._device = Device(clock or WallClock())
        patterns = _patterns([shape for layer in profile.layers for shape in layer.shapes])
        chain = []
        for index, layer in enumerate(profile.layers):
            own = [patterns.pop(0) for _ in layer.shapes]
            feedback = _SIGNS[index % len(_SIGNS)] * _FEEDBACK / len(profile.layers)
            chain.append(EmulatedLayer(layer, own, feedback, self._device))
            _place(self, layer.name, chain[-1])
        self._chain = chain  # a plain list: the modules are registered by name already

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self._device.idle()  # between steps one may have waited
        for layer in self._chain:
            batch = layer(batch)
        return batch


class EmulatedLayer(nn.Module):
    """Multiplies the number by one near 1 that depends on the weights; each gradient is its pattern times both numbers, that
    which came in and that which flows back."""

    def __init__(self, layer: Layer, patterns: Sequence[torch.Tensor], feedback: float, device: Device) -> None:
        super().__init__()
        self.forward_seconds = layer.forward_seconds
        self.backward_seconds = layer.backward_seconds
        self.device = device
        self.feedback = feedback
        self.patterns = list(patterns)  # not buffers: nobody is to broadcast or save them
        self._firsts = [pattern.flatten()[0].item() for pattern in patterns]
        for index, pattern in enumerate(patterns):
            self.register_parameter(f"weight{index}", nn.Parameter(_INITIAL_SCALE * pattern))

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        # Dispatched to each parameter, at no cost that grows with it: here a guarded one waits for its update.
        asked = self.device.now()
        weights = [parameter.view_as(parameter) for parameter in self._parameters.values() if parameter is not None]
        if self.device.now() - asked > _READING_SECONDS:
            self.device.idle()
        apply: Callable[..., torch.Tensor] = _EmulatedFunction.apply
        return apply(number, self, *weights)

    def gain(self, weights: Sequence[torch.Tensor]) -> float:
        """The layer's factor, read off the first element of each weight: how far, on the mean, they have moved along their
        patterns. The phase makes a single step count: who misses one in any layer trains other weights, by far more than
        rounding."""
        if not weights:
            return 1.0
        moved = [weight.flatten()[0].item() / first - _INITIAL_SCALE for weight, first in zip(weights, self._firsts)]
        return math.exp(self.feedback * math.sin(_PHASE * sum(moved) / len(moved)))


class _EmulatedFunction(torch.autograd.Function):
    """Results are made first and handed out when the layer's time is over, so that making them costs no time of its own."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, layer: EmulatedLayer, *weights: torch.Tensor) -> torch.Tensor:
        began = layer.device.begin()
        ctx.layer, ctx.number, ctx.gain = layer, number.item(), layer.gain(weights)
        result: torch.Tensor = number * ctx.gain
        layer.device.end(began, layer.forward_seconds)
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: EmulatedLayer = ctx.layer
        began = layer.device.begin()
        scale = upstream[0].item() * ctx.number
        gradients = [pattern * scale for pattern in layer.patterns]
        number = upstream[0] * ctx.gain
        layer.device.end(began, layer.backward_seconds)
        return number, None, *gradients


def _patterns(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Fixed numbers in [-1, 1], never 0, for each shape; all are views of one tensor, each from a place of its own."""
    longest = max((math.prod(shape) for shape in shapes), default=0)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(longest + _OFFSETS, generator=generator).mul_(2).sub_(1).add_(2**-25)  # half the least step
    places = [index * _STRIDE % _OFFSETS for index in range(len(shapes))]
    return [numbers[place : place + math.prod(shape)].view(shape) for place, shape in zip(places, shapes)]


def _place(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Register ``layer`` under the dotted ``name``, making what it lies in, and taking over what lies in it."""
    *path, last = name.split(".")
    parent = root
    try:
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        before = parent._modules.pop(last, None)
        if isinstance(before, EmulatedLayer):
            raise ValueError(f"two layers are called {name!r}")
        parent.add_module(last, layer)
        for child_name, child in before.named_children() if before is not None else ():
            layer.add_module(child_name, child)
    except (KeyError, AttributeError) as error:
        raise ValueError(f"a layer cannot be called {name!r}: {error}") from error
