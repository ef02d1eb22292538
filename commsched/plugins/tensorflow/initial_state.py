"""All ranks begin with rank 0's weights and optimizer state."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras.saving import serialize_keras_object

import commsched

from ...core.comparison import require_same
from ...core.errors import UnsupportedError
from ..common.collectives import broadcast_arrays, format_spec
from .guard import unguarded


def common_name(index: int, variable: Any) -> str:
    """A name that is the same on all ranks. It omits the numbers that Keras gives to the layers of one process."""
    return f"{index} {without_numbers(variable.path)}"


def without_numbers(path: str) -> str:
    return re.sub(r"_[0-9]+(?=[/_]|$)", "", path)


def require_same_optimizer(session: commsched.Session, kind: type, optimizer: Any) -> None:
    """Require equal optimizers on all ranks. A constant learning rate may differ, since rank 0's is used. Collective.

    Raises:
        ManifestMismatch: the ranks' optimizers differ; names the hyper-parameter that does.
    """
    config = {key: value for key, value in optimizer.get_config().items() if key != "name"}
    config["variables excluded from weight decay"] = _excluded(optimizer)
    if isinstance(config.get("learning_rate"), float):
        del config["learning_rate"]
    record = {"class": kind.__name__, **json.loads(json.dumps(serialize_keras_object(config), default=repr))}
    require_same(session.gather(record), lambda different: f"the optimizer's '{different.key}' is {different.text()}")


def _excluded(optimizer: Any) -> list[str]:
    """The names of variables excluded by ``exclude_from_weight_decay``, which Keras's config does not contain."""
    trained = enumerate(optimizer._trainable_variables)
    return [common_name(index, variable) for index, variable in trained if not optimizer._use_weight_decay(variable)]


def broadcast_variables(session: commsched.Session, what: str, variables: Sequence[Any]) -> None:
    """Assign rank 0's values to Keras variables of any type, bit for bit. Collective. The variables must not be guarded.

    Raises:
        ManifestMismatch: the ranks have different variables; names the first that differs.
        UnsupportedError: a variable's values have no fixed size.
    """
    records = [[common_name(index, each), list(each.shape), str(each.dtype)] for index, each in enumerate(variables)]
    require_same(session.gather(records), lambda different: f"{what}: {different.text(format_spec)}")
    with unguarded():
        arrays = [np.asarray(variable.numpy()) for variable in variables]
        for variable, array in zip(variables, arrays):
            if array.dtype.hasobject:
                raise UnsupportedError(f"'{variable.path}' is {variable.dtype}, which cannot be broadcast")
        received = broadcast_arrays(session, what, arrays)
        if session.rank != 0:
            for variable, array in zip(variables, received):
                variable.assign(array)
