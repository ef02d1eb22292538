"""Profiles from arithmetic alone: ``python -m bench.profile.derive`` writes those of ``bench/workloads/profiles``.

A layer's time is its share of the model's floating-point operations. The model runs without data (on torch's meta device), so
this needs neither the model's memory nor a GPU. Forward counts the layer's operations. Backward counts twice as many: once for
the gradient of the inputs and once for the gradient of the weights; the first layer's inputs need no gradient. Layers without
matrix products or convolutions (norms, embeddings) get no time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from commsched.simulator.profile import LayerProfile, Profile

from ..harness.layer_times import parameter_layers
from ..workloads import PROFILES
from .full_size import FULL_SIZE, FullSize, to_json

_DECIMALS = 9  # nanoseconds: files are readable, and the same on every machine


def profile_of(name: str, model: FullSize, source: str, seconds: Callable[[int], float]) -> Profile:
    """The profile of one step with the model's own batch size.

    Args:
        source: the source of the times, in words.
        seconds: returns the seconds of a whole step, given the floating-point operations of its forward.
    """
    device = torch.device("meta")
    with device:
        module = model.make_model()
    counted = forward_flops(module, model.inputs(model.batch, device)[: model.forward_inputs])
    forward = list(counted.values())
    backward = [forward[0], *(2 * count for count in forward[1:])]
    unit = seconds(sum(forward)) / (sum(forward) + sum(backward))
    modules = dict(module.named_modules())
    owners = parameter_layers([(name, modules[name]) for name in counted])
    layers = tuple(
        LayerProfile(
            owner.name, tuple(tuple(p.shape) for p in owner.parameters), _rounded(unit * first), _rounded(unit * second)
        )
        for owner, first, second in zip(owners, forward, backward)
    )
    return Profile(name, layers, source)


def forward_flops(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, int]:
    """Operations of each module that has parameters, in order of first use. Operations that run before the next such module are
    included.

    A multiplication and an addition count as two operations.
    """
    counter = FlopCounterMode(display=False)
    begins: dict[str, int] = {}

    def use_of(name: str) -> Callable[..., None]:
        def use(*_: Any) -> None:
            begins.setdefault(name, counter.get_total_flops())

        return use

    handles = [
        module.register_forward_pre_hook(use_of(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        with torch.no_grad(), counter:
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    moments = [*begins.values(), counter.get_total_flops()]
    return {name: after - before for name, (before, after) in zip(begins, pairwise(moments))}


def _rounded(seconds: float) -> float:
    return round(seconds, _DECIMALS)


_CHART = "ByteScheduler's published charts (8 V100, 32 images each, 10000 classes)"
#: Seconds of a step of one GPU: 256 images divided by the images per second of 8 GPUs, to three digits.
_STEP_SECONDS = {"vgg16": 0.324, "resnet50": 0.154}
_FLOPS_PER_SECOND = 50e12


def derive(name: str) -> Profile:
    """The profile of a model, derived from its floating-point operations."""
    model = FULL_SIZE[name]
    batch = f"batch of {model.batch} {model.shape}"
    if name in _STEP_SECONDS:
        source = f"by FLOPs, {batch}; {_STEP_SECONDS[name] * 1000:.0f} ms a step, read off {_CHART}"
        return profile_of(name, model, source, lambda _: _STEP_SECONDS[name])
    source = f"by FLOPs, {batch}; assumed: {_FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, backward twice forward"
    return profile_of(name, model, source, lambda forward: 3 * forward / _FLOPS_PER_SECOND)


def main() -> None:
    for name in ("vgg16", "resnet50", "bert-base", "gpt2-small"):
        (PROFILES / f"{name}.json").write_text(to_json(derive(name)))


if __name__ == "__main__":
    main()
