"""Where the tests of PyTorch's loops compute: ``LOOPS_ON=cuda:0`` puts models and batches on a GPU, from where gradients travel
as those of users do. ``LOOPS_ON=simulated`` puts the gradients on a simulated device. Without it all is on the CPU."""

from __future__ import annotations

import os
from typing import Any

import torch

LOOPS_ON = os.environ.get("LOOPS_ON", "cpu")

#: The device of models and batches.
DEVICE = torch.device("cpu" if LOOPS_ON == "simulated" else LOOPS_ON)


def here(value: Any) -> Any:
    """A tensor or a module on :data:`DEVICE`. A module keeps its parameters' identities."""
    return value.to(DEVICE)
