"""``python -m bench profile``: the layers of a model at full size, timed on this machine's GPU or processor.

Every benchmark accepts the file as ``--model``. Times are REAL: medians over training steps with random inputs, without
optimizer and without communication.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from commsched import ConfigError
from commsched.simulator.profile import LayerProfile, Profile

from ..harness.arguments import at_least
from ..harness.layer_times import LayerTimer, clock_of
from .full_size import FULL_SIZE, FullSize, to_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(FULL_SIZE), required=True, help="at full size")
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default: %(default)s)",
    )
    parser.add_argument("--batch", type=at_least(1), metavar="N", help="default: the one of the shipped profile")
    parser.add_argument("--steps", type=at_least(1), default=20, metavar="N", help="that count (default: 20)")
    parser.add_argument("--warm-up", type=at_least(1), default=5, metavar="N", help="steps before them (default: 5)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where autocast does; gradients stay float32")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="where the profile goes")


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU it can use here")
    if args.out.suffix != ".json" or not args.out.parent.is_dir():
        raise ConfigError(f"out={args.out}: must end in .json and lie in a directory that exists")
    model, device = FULL_SIZE[args.model], torch.device(args.device)
    profile = measure(args.model, model, device, args.batch or model.batch, args.steps, args.warm_up, args.bf16)
    args.out.write_text(to_json(profile))
    print(
        f"{args.model}: {len(profile.layers)} layers, {profile.nbytes / 1e6:.1f} MB of gradients, forward "
        f"{1000 * profile.forward_seconds:.2f} ms, backward {1000 * profile.backward_seconds:.2f} ms\n"
        f"{profile.source}\nwritten to {args.out}; use it with --model {args.out}"
    )
    return 0


def measure(
    name: str, full_size: FullSize, device: torch.device, batch: int, steps: int, warm_up: int, bf16: bool = False
) -> Profile:
    """The profile of a model from ``steps`` training steps after ``warm_up``."""
    clock = clock_of(device)
    model = full_size.make_model().to(device)
    inputs = full_size.inputs(batch, device)
    timer = LayerTimer(model, clock)
    for _ in range(warm_up + steps):
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = full_size.loss(model, *inputs)
        forward_ended = clock.now()
        loss.backward()
        backward_ended = clock.now()
        timer.step(forward_ended, backward_ended, backward_ended)
    times = timer.result(warm_up)
    layers = (
        LayerProfile(owner.name, tuple(tuple(p.shape) for p in owner.parameters), forward, backward)
        for owner, forward, backward in zip(timer.layers, times.forward_seconds, times.backward_seconds)
    )
    arithmetic = "bfloat16 autocast" if bf16 else "float32"
    source = f"measured on {_device_name(device)}, torch {torch.__version__}, {arithmetic}, batch of {batch} {full_size.shape}"
    return Profile(name, tuple(layers), source)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"the processor ({torch.get_num_threads()} threads)"
