"""PyTorch plugin.

    import commsched.plugins.torch as cs
    optimizer = cs.ScheduledOptimizer(optimizer, model)

Everything else of the training loop stays as it is.

On a CUDA device, updates run in order on the stream that reads the parameters. Before another stream reads them, call
``optimizer.synchronize()`` and let that stream wait for the current one, as for any work of another stream.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs PyTorch: pip install "commsched[torch]"', name="torch") from error

from .comm_hook import CommHookState, comm_hook
from .join import Join
from .optimizer import ScheduledOptimizer

__all__ = ["CommHookState", "Join", "ScheduledOptimizer", "comm_hook"]
