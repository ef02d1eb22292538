"""PyTorch plugin.

    import commsched.plugins.torch as cs
    optimizer = cs.ScheduledOptimizer(optimizer, model)

Everything else of the training loop stays as it is.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs PyTorch: pip install "commsched[torch]"', name="torch") from error

from .optimizer import ScheduledOptimizer

__all__ = ["ScheduledOptimizer"]
