"""What torch's profiler shows of a training with commsched."""

from __future__ import annotations

from typing import Any

import torch

from .loops.loop import Data, run, train


def test_waits_and_updates_are_ranges_of_torch_s_profiler() -> None:
    """On the threads that train, which here are those of two ranks; another rank's thread is not profiled."""

    def loop(data: Data, model: Any, optimizer: Any) -> set[str]:
        if data.ranks != [0]:
            train(data, model, optimizer, 3)
            return set()
        with torch.autograd.profiler.profile() as profile:
            train(data, model, optimizer, 3)
        return {event.name for event in profile.function_events if event.name.startswith("commsched.")}

    names = run(loop)[0]
    assert any(name.startswith("commsched.update ") for name in names), names
    assert any(name.startswith("commsched.wait ") for name in names), names
