"""All ranks begin with rank 0's parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import mxnet as mx
from numpy.typing import NDArray

import commsched

from ...core.comparison import require_same
from ..common.collectives import broadcast_arrays, format_spec, gather_alike
from .slot import dtype_name

TRAINER_ADVICE = "load or set values after the trainer was made on all ranks, and run the first forward on all ranks"


def begin_from_rank_0(session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Replace the values of ``parameters``, trained or not, by the values of rank 0. Collective.

    A parameter whose shape is unknown until the first forward is replaced in that forward, which is then collective too.

    Raises:
        ManifestMismatch: the ranks' parameters differ.
    """
    records = session.gather([_describe(parameter) for parameter in parameters])
    require_same(records, lambda different: f"the trainer has {different.text(_text)}")
    there = [parameter for parameter in parameters if _is_there(parameter)]
    _broadcast(session, "initial parameters", [parameter.data() for parameter in there])
    for parameter in parameters:
        if not _is_there(parameter):
            # Gluon has no public way to change an initialisation that is deferred.
            init, contexts, default, data = parameter._deferred_init
            parameter._deferred_init = (init, contexts, _FromRank0(session, mx.init.create(default)), data)


def require_equal_values(session: commsched.Session, parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Require equal values on all ranks before the first average. Collective.

    They may differ because the user loaded other values on some ranks only.

    Raises:
        ManifestMismatch: a parameter differs. Names it.
    """
    digests = {parameter.name: _digest(parameter.data().asnumpy()) for parameter in parameters}
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


def _digest(value: NDArray[Any]) -> str:
    return hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()


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
