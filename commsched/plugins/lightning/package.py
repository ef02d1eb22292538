"""Chooses between ``lightning.pytorch`` and ``pytorch_lightning``, which is the same code in a package of its own.

The classes of the two packages are different, so the strategy must use the package whose ``Trainer`` is used. This is the
package imported so far, or else the installed one.
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
