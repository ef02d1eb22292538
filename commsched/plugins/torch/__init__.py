"""PyTorch plugin.

    import commsched.plugins.torch as cs
    optimizer = cs.ScheduledOptimizer(optimizer, model)

Everything else of the training loop stays as it is.
"""

from .optimizer import ScheduledOptimizer

__all__ = ["ScheduledOptimizer"]
