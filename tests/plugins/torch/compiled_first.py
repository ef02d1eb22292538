"""A process in which a model is compiled, and has run, before commsched is used. Its training must be right all the same."""

from __future__ import annotations

from typing import Any

import torch

from commsched.plugins.torch import marked
from tests.plugins.torch.loops import loop as loops
from tests.plugins.torch.loops.loop import Data, batch, mlp, require_plain, train
from tests.plugins.torch.test_compiled import KERNELS, OfItsThread, by_identity, compiles


class Compiled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        code: Any = torch.compile(self.body, backend=KERNELS, options={"guard_filter_fn": by_identity})
        code(batch(0))
        self.code = [code]  # not a submodule

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.code[0](inputs)
        return outputs


def loop(data: Data, model: Any, optimizer: Any) -> str | None:
    train(data, model if compiles(data) else model.body, optimizer, steps=4)
    why: str | None = getattr(optimizer, "_why_step_waits", None)
    return why


if __name__ == "__main__":
    loops.ScheduledOptimizer = OfItsThread  # type: ignore[misc]
    marked.marked_twin = lambda _: None  # type: ignore[assignment]  # kernels that take addresses would see no marks
    require_plain(loop, model=Compiled)
    print("right")
