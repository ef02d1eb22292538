"""All ranks begin with the weights and the optimizer state of rank 0, and stay equal: compares the optimizer's numbers, the
user's assignments and the weights."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import re
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.saving import serialize_keras_object

import commsched

from ...core.comparison import require_same
from ...core.errors import UnsupportedError
from ..common.collectives import broadcast_arrays, format_spec
from ..common.weights_check import WeightsCheck, digest_of
from .guard import unguarded

#: The key that is compared first: if ranks do different things, that explains every other difference.
_NOW = "what comes now"
_LONGEST_VALUE = 200  # characters of a list or an array in an error


class Agreement:
    """Compares the variables and the optimizer's numbers between ranks.

    The optimizer's numbers, and a digest of the assignments since the previous step, travel with the flags of each step. In
    addition, the next part of the weights is compared every ``check_weights`` steps.

    Args:
        what: names the model in errors. Must be unique in this session.
        names: the names of ``variables``, the same on all ranks.
        variables: the trained variables, then the optimizer's other variables.
        trained: the number of trained variables.
        iterations: the variable that counts the optimizer's steps.
        reads_iterations: whether ``iterations`` may be read when a step begins, because it is counted on the host when the step
            is committed. Otherwise the graph of a step may count while the step begins; then the count that the previous step
            has left is compared.
    """

    def __init__(
        self,
        session: commsched.Session,
        what: str,
        names: Sequence[str],
        variables: Sequence[tf.Variable],
        trained: int,
        iterations: tf.Variable,
        reads_iterations: bool,
    ) -> None:
        self._session = session
        self.what = what
        self._names = names
        self._variables = variables
        self._iterations = iterations
        self._reads_iterations = reads_iterations
        self._counted = int(iterations.read_value())
        self._lock = threading.Lock()  # guards _assigned
        self._assigned = 0  # a digest of the assignments since the last step
        self._numbers: dict[str, Any] = {}  # those of the step that was begun last
        nbytes = [math.prod(variable.shape) * variable.dtype.size for variable in variables[:trained]]
        self.weights_check = WeightsCheck(session, names[:trained], nbytes, f"weights of {what}")

    def assigned(self, index: int) -> None:
        """Note that the user has assigned to the variable with this ``index``, eagerly. Any thread."""
        value = _bytes_of(self._variables[index])
        with self._lock:
            self._assigned = zlib.crc32(value, zlib.crc32(struct.pack("q", index), self._assigned))

    def numbers(self, of_update: Mapping[str, Any], learning_rate: float) -> dict[str, Any]:
        """The optimizer's numbers for the step that begins."""
        if self._reads_iterations:
            self._counted = int(self._iterations.read_value())
        own = {"learning_rate": _plain(float(learning_rate)), "iterations": self._counted}
        self._numbers = {_NOW: "a step", **own, **of_update}
        return self._numbers

    def numbers_of_meeting(self, doing: str) -> dict[str, Any]:
        """The numbers for a meeting instead of a step. ``doing`` names its reason."""
        return {**self._numbers, _NOW: doing}

    def take_assigned(self) -> int:
        """A digest of the assignments since the last call."""
        with self._lock:
            assigned, self._assigned = self._assigned, 0
        return assigned

    def compare_assigned(self, step: int) -> None:
        """Compare all variables, because the ranks' assignments differ. Call it before the variables are updated in ``step``.

        The variables may be equal nevertheless, for example if one rank has swapped other values in and back.
        """
        digests = {name: f"{digest_of(_bytes_of(each)):08x}" for name, each in zip(self._names, self._variables)}
        self._session.compare(f"weights of {self.what}, which ranks have assigned differently,", step, digests)

    # --- weights ---

    def check(self, index: int) -> None:
        """Compare the variable with this ``index``, if this step's part of the weights includes it. Its update of this step
        must be made, and no thread may change it meanwhile."""
        part = self.weights_check.wanted(index)
        if part is not None:
            self.weights_check.add(index, digest_of(_bytes_of(self._variables[index])[slice(*part)]))

    def check_all(self, step: int) -> None:
        """Compare all variables in the part of the weights for ``step``, if there is one. All updates of ``step`` must be made,
        and no thread may change variables meanwhile."""
        self._counted = int(self._iterations.read_value())
        if self.weights_check.begin(step):
            for index in range(len(self._variables)):
                self.check(index)


def numbers_of(optimizer: Any, prefix: str = "") -> dict[str, Any]:
    """The present values of the arguments that the optimizer, and an optimizer within it, were made with: plain values by name,
    which JSON can hold."""
    found: dict[str, Any] = {}
    kind: type = type(optimizer)
    names = _names(kind)
    for name, value in vars(optimizer).items():
        if isinstance(value, keras.optimizers.Optimizer):
            found |= numbers_of(value, f"{prefix}{name}.")
        elif name in names and (plain := _plain(value)) is not ...:
            found[prefix + name] = plain
    return found


@cache
def _names(kind: type) -> frozenset[str]:
    """The names of the constructor's arguments of optimizers of this class. Other attributes may be anything."""
    makers = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each) and each is not object]
    return frozenset(name for maker in makers for name in inspect.signature(maker).parameters) - {"name"}


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | np.ndarray):
        text = json.dumps(np.asarray(value).tolist(), default=repr)
        return text if len(text) <= _LONGEST_VALUE else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return ...  # variables, and other values that are not numbers


def _bytes_of(variable: tf.Variable) -> memoryview:
    return np.ascontiguousarray(variable.read_value().numpy()).reshape(-1).view(np.uint8).data


def common_name(index: int, variable: Any) -> str:
    """A name that is the same on all ranks. It omits the numbers that Keras gives to the layers of one process."""
    return f"{index} {without_numbers(variable.path)}"


def without_numbers(path: str) -> str:
    return re.sub(r"_[0-9]+(?=[/_]|$)", "", path)


def require_same_optimizer(session: commsched.Session, kind: type, optimizer: Any) -> None:
    """Require equal optimizers on all ranks. A constant learning rate may differ, since rank 0's is used. Collective. Raises
    ManifestMismatch if the ranks' optimizers differ; the error names the hyper-parameter that does."""
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
    """Assign rank 0's values to Keras variables of any type, bit for bit. Collective. The variables must not be guarded. Raises
    ManifestMismatch, which names the first variable that differs, and UnsupportedError if values have no fixed size."""
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
