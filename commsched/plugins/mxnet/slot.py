"""Slot: one trained parameter, and the place of its gradient in a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec
from .queued_group import BufferPlace

_DTYPES = ("float16", "float32", "float64")


class Slot:
    """A parameter and its ``place``.

    MXNet's engine copies the gradient to the place, and the average back. The gradient's own array cannot lie in the flat
    buffer: a block that is hybridized with ``static_shape=True`` always writes to the array of its first backward, and before
    that backward the shapes may be unknown.

    ``fresh``: backward has written the gradient on this rank since the last update. ``used``: backward has written it on this
    rank or on another rank. Other ranks are asked only where this rank has no new gradient.
    """

    def __init__(self, parameter: mx.gluon.Parameter, place: BufferPlace) -> None:
        self.name: str = parameter.name
        self.parameter = parameter
        self.place = place
        self.fresh = False
        self.used = False

    @property
    def data(self) -> mx.nd.NDArray:
        return self.parameter.data()

    @property
    def gradient(self) -> mx.nd.NDArray:
        return self.parameter.grad().as_nd_ndarray()  # an mx.np.ndarray keeps its memory

    @property
    def is_frozen(self) -> bool:
        return str(self.parameter.grad_req) == "null"

    def require_as_registered(self) -> None:
        """Require that the parameter still has the shape, dtype and device that were registered.

        Raises:
            UnsupportedError: the parameter was cast or reshaped, or moved to another device.
        """
        require_averageable(self.parameter)
        array = self.place.array
        is_now, was = spec_of(self.parameter), TensorSpec(self.name, tuple(array.shape), dtype_name(array.dtype))
        if is_now != was:
            raise UnsupportedError(
                f"parameter {was} is {is_now} now: make another ScheduledTrainer after detach() of this one, on all ranks"
            )


def spec_of(parameter: mx.gluon.Parameter) -> TensorSpec:
    data = parameter.data()
    return TensorSpec(parameter.name, tuple(data.shape), dtype_name(data.dtype))


def dtype_name(dtype: Any) -> str:
    """Return numpy's name of ``dtype``, or its own name for a type that only MXNet has."""
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def require_averageable(parameter: mx.gluon.Parameter) -> None:
    """Require that the parameter's gradient can be averaged.

    Raises:
        UnsupportedError: it cannot be averaged. Says why.
    """
    name = f"parameter '{parameter.name}'"
    _require_on_cpu(name, parameter.list_ctx())
    if parameter._stype != "default" or parameter._grad_stype != "default":
        raise UnsupportedError(
            f"{name} is {parameter._stype}, its gradient {parameter._grad_stype}: only dense ones can be averaged "
            "(sparse_grad=False, grad_stype='default')"
        )
    _require_floats(name, parameter.dtype)


def require_averageable_array(name: str, array: mx.nd.NDArray) -> None:
    """Require that ``array`` can be averaged.

    Raises:
        UnsupportedError: it cannot be averaged. Calls it ``name`` and says why.
    """
    _require_on_cpu(name, [array.context])
    require_dense(name, array)
    _require_floats(name, array.dtype)


def require_dense(name: str, array: mx.nd.NDArray) -> None:
    """Require that ``array`` is dense.

    Raises:
        UnsupportedError: it is sparse.
    """
    if array.stype != "default":
        raise UnsupportedError(f"{name} is {array.stype}: only dense ones can be averaged")


def _require_on_cpu(name: str, contexts: Sequence[mx.Context]) -> None:
    if contexts != [mx.cpu(0)]:
        raise UnsupportedError(
            f"{name} is on {', '.join(map(str, contexts))}; gradients are averaged on cpu(0) alone, "
            "in one process for each device"
        )


def _require_floats(name: str, dtype: Any) -> None:
    if dtype_name(dtype) not in _DTYPES:
        raise UnsupportedError(f"{name} is {dtype_name(dtype)}; only gradients of {', '.join(_DTYPES)} can be averaged")
