"""MXNet (Gluon) plugin.

    import commsched.plugins.mxnet as cs
    trainer = cs.ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

Everything else of the training loop stays as it is. It also adds a kvstore of the name "dist_sync_commsched".
"""

try:
    import mxnet as _mxnet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs MXNet: pip install "commsched[mxnet]"', name=error.name) from error

import commsched

from ...core.errors import UnsupportedError

# How an operation of the engine is told to complete changed with MXNet 2; calling it wrongly would be a crash.
if not _mxnet.__version__.startswith("1."):
    raise UnsupportedError(f"this plugin is for MXNet 1, and this is {_mxnet.__version__}")

from .forward_spans import trace_forward
from .store import ScheduledStore
from .trainer import ScheduledTrainer

commsched.end_first()  # what is outstanding is finished by MXNet's engine

__all__ = ["ScheduledStore", "ScheduledTrainer", "trace_forward"]
