"""The parameters of a trainer: the place of each gradient in a flat buffer, what can be averaged, and the values of rank 0,
with which all ranks begin."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

import commsched

from ...core.comparison import require_same
from ...core.errors import UnsupportedError
from ...core.manifest import TensorSpec
from ..common.collectives import broadcast_arrays, format_spec, gather_alike
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
        """Require that the parameter still has the shape, dtype and device that were registered. Raises UnsupportedError if the
        parameter was cast or reshaped, or moved to another device."""
        require_averageable(self.parameter)
        is_now, was = spec_of(self.name, self.data), spec_of(self.name, self.place.array)
        if is_now != was:
            raise UnsupportedError(
                f"parameter {was} is {is_now} now: make another ScheduledTrainer after detach() of this one, on all ranks"
            )


def spec_of(name: str, array: mx.nd.NDArray) -> TensorSpec:
    return TensorSpec(name, tuple(array.shape), dtype_name(array.dtype))


def dtype_name(dtype: Any) -> str:
    """Return numpy's name of ``dtype``, or its own name for a type that only MXNet has."""
    try:
        return str(np.dtype(dtype))
    except TypeError:
        return str(dtype)


def require_averageable(parameter: mx.gluon.Parameter) -> None:
    """Require that the parameter's gradient can be averaged. Raises UnsupportedError, which says why it cannot."""
    name = f"parameter '{parameter.name}'"
    _require_on_cpu(name, parameter.list_ctx())
    if parameter._stype != "default" or parameter._grad_stype != "default":
        raise UnsupportedError(
            f"{name} is {parameter._stype}, its gradient {parameter._grad_stype}: only dense ones can be averaged "
            "(sparse_grad=False, grad_stype='default')"
        )
    _require_floats(name, parameter.dtype)


def require_averageable_array(name: str, array: mx.nd.NDArray) -> None:
    """Require that ``array``, called ``name``, can be averaged. Raises UnsupportedError, which says why it cannot."""
    _require_on_cpu(name, [array.context])
    require_dense(name, array)
    _require_floats(name, array.dtype)


def require_dense(name: str, array: mx.nd.NDArray) -> None:
    """Require that ``array`` is dense. Raises UnsupportedError if it is sparse."""
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


TRAINER_ADVICE = "load or set values after the trainer was made on all ranks, and run the first forward on all ranks"


def require_same_parameters(session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Require equal names, shapes and types on all ranks. Collective. Raises ManifestMismatch if they differ."""
    records = session.gather([_describe(parameter) for parameter in parameters])
    require_same(records, lambda different: f"the trainer has {different.text(_text)}")


def begin_from_rank_0(session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Replace the values of ``parameters``, trained or not, by the values of rank 0. Collective.

    A parameter whose shape is unknown until the first forward is replaced in that forward, which is then collective too.
    """
    there = [parameter for parameter in parameters if _is_there(parameter)]
    _broadcast(session, "initial parameters", [parameter.data() for parameter in there])
    for parameter in parameters:
        if not _is_there(parameter):
            # Gluon has no public way to change an initialisation that is deferred.
            init, contexts, default, data = parameter._deferred_init
            parameter._deferred_init = (init, contexts, _FromRank0(session, mx.init.create(default)), data)


def require_equal_values(session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Require equal values on all ranks before the first average. They may differ because the user loaded other values on some
    ranks only. Collective. Raises ManifestMismatch if a parameter differs; the error names it."""
    digests = {parameter.name: digest_of_array(parameter.data()) for parameter in parameters}
    require_same(
        session.gather(digests),
        lambda different: (
            f"parameter '{different.key}' has other values on rank {different.rank} than on rank 0: load values after the "
            "trainer was made on all ranks"
        ),
    )


class _FromRank0(mx.init.Initializer):  # type: ignore[misc]
    """Initialises with ``initializer``, then takes the values of rank 0."""

    def __init__(self, session: commsched.Session, initializer: mx.init.Initializer) -> None:
        super().__init__()
        self._session = session
        self._initializer = initializer

    def __call__(self, name: mx.init.InitDesc, array: mx.nd.NDArray) -> None:
        self._initializer(name, array)
        gather_alike(self._session, f"initialises parameter '{name}'", None, TRAINER_ADVICE)
        _broadcast(self._session, f"parameter {name}", [array])


def _broadcast(session: commsched.Session, name: str, arrays: Sequence[mx.nd.NDArray]) -> None:
    received = broadcast_arrays(session, name, [array.asnumpy() for array in arrays])
    if session.rank != 0:
        for array, value in zip(arrays, received):
            array[:] = value


def digest_of_array(array: mx.nd.NDArray) -> str:
    return hashlib.blake2b(array.asnumpy().tobytes(), digest_size=16).hexdigest()


def _is_there(parameter: mx.gluon.Parameter) -> bool:
    try:
        parameter.data()
    except mx.gluon.parameter.DeferredInitializationError:
        return False
    return True


def _describe(parameter: mx.gluon.Parameter) -> list[Any]:
    return [parameter.name, list(parameter.shape or ()), dtype_name(parameter.dtype), _is_there(parameter)]


def _text(item: list[Any] | None) -> str:
    return format_spec(item) + ("" if item is None or item[3] else ", not initialised yet,")
