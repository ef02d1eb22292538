"""Makes the profiles in ``bench/workloads/profiles``: ``python -m bench.workloads.derive``."""

from __future__ import annotations

import json

from commsched.simulator.profile import Profile

from .flops import profile_of
from .full_size import FULL_SIZE
from .registry import PROFILES

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


def to_json(profile: Profile) -> str:
    """The profile as JSON, with one line for each layer."""
    record = profile.to_record()
    layers = ",\n    ".join(json.dumps(layer) for layer in record.pop("layers"))
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in record.items())
    return f'{{\n{head}  "layers": [\n    {layers}\n  ]\n}}\n'


def main() -> None:
    for name in ("vgg16", "resnet50", "bert-base", "gpt2-small"):
        (PROFILES / f"{name}.json").write_text(to_json(derive(name)))


if __name__ == "__main__":
    main()
