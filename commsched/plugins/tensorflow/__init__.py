"""TensorFlow plugin.

    from commsched.plugins.tensorflow import ScheduledOptimizer
    optimizer = ScheduledOptimizer(optimizer, model)

Everything else, ``model.compile`` and ``model.fit`` or a training step of your own, stays as it is.
"""

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs TensorFlow: pip install "commsched[tensorflow]"', name="tensorflow") from error

from ...core.errors import CommschedError
from .logs import AverageLogs
from .optimizer import ScheduledOptimizer

# AutoGraph replaces an error whose class has its own constructor by a StagingError. This attribute makes it pass the error on.
CommschedError.ag_pass_through = True  # type: ignore[attr-defined]

__all__ = ["AverageLogs", "ScheduledOptimizer"]
