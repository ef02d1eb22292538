"""EMULATED models: the autograd graph, parameters and gradients of a profile. Layers sleep for the time that a GPU would take.

Gradients are real float32 tensors. They depend on the parameter, the rank and the step. Through the numbers that forward passes
from layer to layer, they also depend on the weights that forward read. A training that reads a stale weight therefore gets
other numbers than plain training. The CPU cost is one multiplication per element of gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from commsched.simulator.profile import LayerProfile, Profile

#: Number of offsets in the shared random numbers at which a parameter's pattern can begin.
_OFFSETS = 4096
_STRIDE = 997  # between the offsets of successive parameters; coprime to _OFFSETS
#: All layers together change a number by at most a factor of exp(+-_FEEDBACK), so that training does not diverge.
_FEEDBACK = 1.5
#: Radians of a gain's phase for each unit that weights have moved along their patterns; a step moves them by about 0.01.
_PHASE = 64.0
#: Signs of the layers' feedback: two layers in three have one sign and the third the other. With equal signs, later steps would
#: compensate most of the effect of one stale layer. If the signs cancelled, a test could not detect that all layers are stale.
_SIGNS = (1, 1, -1)
_INITIAL_SCALE = 0.1
#: If reading a layer's parameters takes longer than this, the host has waited for them or updated them.
_READING_SECONDS = 200e-6


class Clock(Protocol):
    def now(self) -> float:
        """Monotonic time in seconds."""
        ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


class Device:
    """The emulated GPU. It works through its layers and does not stop when the host wakes up late.

    If a layer took too long (because a sleep lasted longer, or results took longer to compute), the excess is subtracted from
    the next layers, as long as the host did not wait for anything in between.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late_seconds = 0.0
        self._ended_at = 0.0

    def idle(self) -> None:
        """Mark the device as idle: the next layer begins when the host calls :meth:`begin`."""
        self._late_seconds = 0.0

    def idle_if_waited(self) -> None:
        """Mark the device as idle if the host has done something else for long since the last layer ended: it has waited."""
        if self._clock.now() - self._ended_at > _READING_SECONDS:
            self.idle()

    def now(self) -> float:
        return self._clock.now()

    def begin(self) -> float:
        """The time at which the layer that the host begins now began on the device."""
        return self._clock.now() - self._late_seconds

    def end(self, began: float, seconds: float) -> None:
        """Sleep until the layer has lasted ``seconds``."""
        ends = began + seconds
        left = ends - self._clock.now()
        if seconds > 0 and left > 0:
            self._clock.sleep(left)
        self._ended_at = self._clock.now()
        self._late_seconds = max(0.0, self._ended_at - ends)


@dataclass(frozen=True)
class EmulatedWorkload:
    """A workload made from a profile, with the profile's times unchanged."""

    profile: Profile
    emulated = True
    device = "cpu"

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
    """The number that stands for a rank's batch. It changes sign over steps, so that weights stay bounded. The average over
    ranks is never zero in all steps, and never equals the number of one rank."""
    return (1 + 0.5 * math.cos(2.9 * rank + 0.3 * step)) * math.cos(1.7 * step)


class EmulatedModel(nn.Module):
    """A chain of the profile's layers. Each is a module with the layer's name. The input is a number, the output the loss.

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
        self._device.idle()  # the host may have waited between steps
        for layer in self._chain:
            batch = layer(batch)
        return batch


class EmulatedLayer(nn.Module):
    """Multiplies its input number by a gain near 1 that depends on the weights. Each gradient is its pattern times the input
    number times the number that flows back."""

    def __init__(self, layer: LayerProfile, patterns: Sequence[torch.Tensor], feedback: float, device: Device) -> None:
        super().__init__()
        self.forward_seconds = layer.forward_seconds
        self.backward_seconds = layer.backward_seconds
        self.device = device
        self.feedback = feedback
        self.number = next(_numbers)
        _layers[self.number] = self
        self.patterns = list(patterns)  # not buffers, which would be broadcast and saved
        self._firsts = [pattern.flatten()[0].item() for pattern in patterns]
        for index, pattern in enumerate(patterns):
            self.register_parameter(f"weight{index}", nn.Parameter(_INITIAL_SCALE * pattern))

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            # torch's splitter counts the bytes of arguments, but not of those in a list.
            own = [parameter.view(parameter.shape) for parameter in self._parameters.values() if parameter is not None]
            result: torch.Tensor = _compiled_forward(number, self.number, own)[0]
            return result
        # This call is dispatched to each parameter, at a cost that does not grow with its size. A guarded parameter waits here
        # for its update.
        asked = self.device.now()
        weights = [parameter.view_as(parameter) for parameter in self._parameters.values() if parameter is not None]
        if self.device.now() - asked > _READING_SECONDS:
            self.device.idle()
        apply: Callable[..., torch.Tensor] = _EmulatedFunction.apply
        return apply(number, self, *weights)

    def gain(self, weights: Sequence[torch.Tensor]) -> float:
        """The layer's gain. It is computed from the first element of each weight: the mean distance that weights have moved
        along their patterns. Because of the phase, a single step has an effect: a training that misses one step in any layer
        gets other weights, by far more than rounding."""
        if not weights:
            return 1.0
        moved = [weight.flatten()[0].item() / first - _INITIAL_SCALE for weight, first in zip(weights, self._firsts)]
        return math.exp(self.feedback * math.sin(_PHASE * sum(moved) / len(moved)))


class _EmulatedFunction(torch.autograd.Function):
    """The autograd function of a layer. Results are computed first and returned when the layer's time is over, so that
    computing them adds no time."""

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


#: The layers, by number: operations of a compiled graph take numbers.
_layers: WeakValueDictionary[int, EmulatedLayer] = WeakValueDictionary()
_numbers = count()

# The same layer in a compiled graph. A compiler cannot look into these operations, as it cannot look into the kernels of a GPU.


@torch.library.custom_op("commsched_bench::forward", mutates_args=())
def _compiled_forward(number: torch.Tensor, layer: int, weights: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's result, and its gain."""
    its = _layers[layer]
    its.device.idle_if_waited()
    began = its.device.begin()
    gain = its.gain(weights)
    result = number * gain
    its.device.end(began, its.forward_seconds)
    return result, torch.full_like(number, gain)


@torch.library.custom_op("commsched_bench::backward", mutates_args=())
def _compiled_backward(
    upstream: torch.Tensor, number: torch.Tensor, gain: torch.Tensor, layer: int, weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    its = _layers[layer]
    began = its.device.begin()
    scale = upstream.item() * number.item()
    gradients = [pattern * scale for pattern in its.patterns]
    before = upstream * gain
    its.device.end(began, its.backward_seconds)
    return [before, *gradients]


@_compiled_forward.register_fake
def _(number: torch.Tensor, layer: int, weights: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(number), torch.empty_like(number)


@_compiled_backward.register_fake
def _(
    upstream: torch.Tensor, number: torch.Tensor, gain: torch.Tensor, layer: int, weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.empty_like(number), *map(torch.empty_like, weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    number, ctx.layer, weights = inputs
    ctx.save_for_backward(number, output[1], *weights)


def _differentiate(ctx: Any, upstream: torch.Tensor, _: Any) -> tuple[Any, ...]:
    number, gain, *weights = ctx.saved_tensors
    before, *gradients = _compiled_backward(upstream, number, gain, ctx.layer, weights)
    return before, None, gradients


_compiled_forward.register_autograd(_differentiate, setup_context=_save)


def _patterns(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Fixed numbers in [-1, 1], never 0, for each shape. All patterns are views of one tensor, each at its own offset."""
    longest = max((math.prod(shape) for shape in shapes), default=0)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(longest + _OFFSETS, generator=generator).mul_(2).sub_(1).add_(2**-25)  # half the least step
    places = [index * _STRIDE % _OFFSETS for index in range(len(shapes))]
    return [numbers[place : place + math.prod(shape)].view(shape) for place, shape in zip(places, shapes)]


def _place(root: nn.Module, name: str, layer: nn.Module) -> None:
    """Register ``layer`` under the dotted ``name``. Missing parent modules are made, and existing children are moved into
    it."""
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
