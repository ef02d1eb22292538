"""Which Lightning: ``lightning.pytorch``, or ``pytorch_lightning``, the same code under the name of its own package.

Their classes are not each other's, so the strategy must be of the one whose ``Trainer`` is used: the one imported so far, else
the one installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING


def _is_pytorch_lightning() -> bool:
    if "lightning.pytorch" in sys.modules:
        return False
    return "pytorch_lightning" in sys.modules or find_spec("lightning") is None


if TYPE_CHECKING or not _is_pytorch_lightning():
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
else:
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

__all__ = ["DDPStrategy", "LightningOptimizer", "StrategyRegistry"]
