"""MXNet (Gluon) plugin.

    import commsched.plugins.mxnet as cs
    trainer = cs.ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

The rest of the training loop does not change. The plugin also adds a kvstore with the name "dist_sync_commsched".
"""

try:
    import mxnet as _mxnet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs MXNet: pip install "commsched[mxnet]"', name=error.name) from error

import commsched

from ...core.errors import UnsupportedError

# MXNet 2 changed how an operation of the engine is completed. The wrong call would crash the process.
if not _mxnet.__version__.startswith("1."):
    raise UnsupportedError(f"this plugin is for MXNet 1, and this is {_mxnet.__version__}")

from .store import ScheduledStore
from .timing import trace_forward
from .trainer import ScheduledTrainer

commsched.end_first()  # outstanding operations need MXNet's engine, so sessions close before it does

__all__ = ["ScheduledStore", "ScheduledTrainer", "trace_forward"]
