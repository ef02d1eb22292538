"""MXNet (Gluon) plugin.

    import commsched.plugins.mxnet as cs
    trainer = cs.ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

Everything else of the training loop stays as it is.
"""

try:
    import mxnet as _mxnet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs MXNet: pip install "commsched[mxnet]"', name=error.name) from error

from ...core.errors import UnsupportedError

# How an operation of the engine is told to complete changed with MXNet 2; calling it wrongly would be a crash.
if not _mxnet.__version__.startswith("1."):
    raise UnsupportedError(f"this plugin is for MXNet 1, and this is {_mxnet.__version__}")

from .trainer import ScheduledTrainer

__all__ = ["ScheduledTrainer"]
