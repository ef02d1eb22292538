"""Everything public in PyTorch that reads a parameter waits for its update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from commsched.plugins.torch import marked

TOP = Path(__file__).parents[3]

#: What gives something else for a parameter whose update is outstanding, and why it may.
LISTED = {
    "torch.Tensor._version": "step() counts as one change at once, and the update as another",
    "torch.Tensor.__weakref__": "whether there are weak references to the object",
    "torch.nn.Parameter.__weakref__": "likewise",
    "torch.nn.Parameter._version": "likewise",
    "overrides.TensorBase._version": "likewise",
    "torch.nn.functional.has_torch_function": "whether the class is one that is asked",
    "torch.nn.functional.has_torch_function_unary": "likewise",
    "torch.nn.functional.has_torch_function_variadic": "likewise",
}


def test_there_are_marks() -> None:
    """Without them, TorchScript, nested tensors and extensions read what is not updated yet."""
    assert marked._key() is not None


def test_what_pytorch_has_for_the_public() -> None:
    """Each function is called with a parameter that is ones, and twos once its update is made. A function that gives what it
    gives for ones has read without waiting. A new one in another PyTorch is to be made to wait, or listed with the reason."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.torch.walk_readers"], cwd=TOP, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"ended in {done.stderr.splitlines()[-1:]}"
    verdicts = json.loads(done.stdout)
    assert set(verdicts["silent"]) <= set(LISTED)
    assert verdicts["refused"] == {}
    assert len(verdicts["read"]) > 1000
    for name in (
        "tensor",
        "asarray",
        "Tensor.as_subclass",
        "Tensor._make_subclass",
        "distributed.scatter",
        "distributed.reduce_scatter",
    ):
        assert f"torch.{name}" in verdicts["read"]
