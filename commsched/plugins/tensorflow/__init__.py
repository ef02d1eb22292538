"""TensorFlow plugin.

    from commsched.plugins.tensorflow import ScheduledOptimizer
    optimizer = ScheduledOptimizer(optimizer, model)

Everything else, ``model.compile`` and ``model.fit`` or a training step of your own, stays as it is.
"""

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs TensorFlow: pip install "commsched[tensorflow]"', name="tensorflow") from error

from .optimizer import ScheduledOptimizer

__all__ = ["ScheduledOptimizer"]
