"""Slot: one trained parameter, and where its gradient travels."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec

_DTYPES = ("float16", "float32", "float64")


class Slot:
    """``array`` is the parameter's place in a flat buffer, as an array of MXNet.

    The gradient is copied there and the average back, by MXNet's engine. Gradients cannot lie there themselves: a block
    hybridized with ``static_shape=True`` keeps writing to the array that it wrote in its first backward, and before that the
    shapes may not be known.

    ``fresh``: backward has written the gradient since the last update, here; ``used``: here or on another rank, as far as this
    rank had to ask. ``busy``: the average is not in place. ``queued``: the round in which it is to be averaged and was not
    computed yet; 0: none.
    """

    def __init__(self, parameter: mx.gluon.Parameter, place: NDArray[Any]) -> None:
        self.name: str = parameter.name
        self.parameter = parameter
        self.array: mx.nd.NDArray = mx.nd.from_numpy(place)
        self.fresh = False
        self.used = False
        self.queued = 0
        self.busy = False

    @property
    def data(self) -> mx.nd.NDArray:
        return self.parameter.data()

    @property
    def gradient(self) -> mx.nd.NDArray:
        return self.parameter.grad().as_nd_ndarray()  # of an mx.np.ndarray: the same memory

    @property
    def is_frozen(self) -> bool:
        return str(self.parameter.grad_req) == "null"

    def require_as_registered(self) -> None:
        """
        Raises:
            UnsupportedError: the parameter was cast, or moved to another device.
        """
        require_averageable(self.parameter)
        is_now, was = spec_of(self.parameter), TensorSpec(self.name, tuple(self.array.shape), dtype_name(self.array.dtype))
        if is_now != was:
            raise UnsupportedError(
                f"parameter {was} is {is_now} now: make another ScheduledTrainer after detach() of this one, on all ranks"
            )


def spec_of(parameter: mx.gluon.Parameter) -> TensorSpec:
    data = parameter.data()
    return TensorSpec(parameter.name, tuple(data.shape), dtype_name(data.dtype))


def dtype_name(dtype: Any) -> str:
    """As numpy calls it; MXNet knows types that numpy does not."""
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def require_averageable(parameter: mx.gluon.Parameter) -> None:
    """
    Raises:
        UnsupportedError: the parameter's gradient cannot be averaged; says why.
    """
    name, contexts = parameter.name, parameter.list_ctx()
    if contexts != [mx.cpu(0)]:
        raise UnsupportedError(
            f"parameter '{name}' is on {', '.join(map(str, contexts))}; gradients are averaged on cpu(0) alone, "
            "in one process for each device"
        )
    if parameter._stype != "default" or parameter._grad_stype != "default":
        raise UnsupportedError(
            f"parameter '{name}' is {parameter._stype}, its gradient {parameter._grad_stype}: only dense ones can be averaged "
            "(sparse_grad=False, grad_stype='default')"
        )
    dtype = dtype_name(parameter.dtype)
    if dtype not in _DTYPES:
        raise UnsupportedError(f"parameter '{name}' is {dtype}; only gradients of {', '.join(_DTYPES)} can be averaged")
