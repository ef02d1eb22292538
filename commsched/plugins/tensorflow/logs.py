"""AverageLogs: averages the logs of ``fit`` over the ranks at the end of an epoch, so that callbacks decide alike on all."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import keras
import numpy as np

import commsched

from ...core.errors import UnsupportedError
from ..common.collectives import gather_alike


class AverageLogs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Replaces each number among an epoch's logs by its mean over the ranks that have it, on all ranks.

    ``fit`` of a model that was given to ScheduledOptimizer puts one before all other callbacks. If you train by another model's
    ``fit``, put it first yourself: ``callbacks=[AverageLogs(), EarlyStopping(...)]``. With equally many samples on each rank,
    the means of losses and accuracies equal the values of the joint data. A value that is not itself a mean (a precision, an
    AUC) becomes the mean over the ranks.

    Collective: at the end of each epoch, on every rank.

    Args:
        session: a session other than the one that ``commsched.init()`` returns.
    """

    def __init__(self, session: commsched.Session | None = None) -> None:
        super().__init__()
        self._session = session

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the numbers in ``logs``. Later callbacks get the same ``logs``.

        Raises:
            RanksDiverged: another rank trains a step, or ends another epoch.
            ManifestMismatch: another rank does something else.
            CommschedError: the session failed or was closed.
        """
        session = self._session or commsched.init()
        if session.world_size == 1:
            return
        logs = {} if logs is None else logs
        for known in _meetings.get(session, ()):
            if (meet := known()) is not None:
                meet(f"the end of epoch {epoch} of fit")
        mine = {name: number for name, value in logs.items() if (number := _number(value)) is not None}
        logs.update(mean_logs(gather_alike(session, f"ends epoch {epoch} of fit", mine, "call fit alike on all ranks")))


def mean_logs(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each name over the ranks that have it, in rank 0's order; bitwise equal on every rank."""
    names = dict.fromkeys(name for theirs in records for name in theirs)
    values = {name: [float(theirs[name]) for theirs in records if name in theirs] for name in names}
    return {name: math.fsum(some) / len(some) if all(map(math.isfinite, some)) else sum(some) for name, some in values.items()}


#: By session: the method of each ScheduledOptimizer that makes its ranks meet.
_meetings: WeakKeyDictionary[commsched.Session, list[WeakMethod[Callable[[str], None]]]] = WeakKeyDictionary()


def meet_in(session: commsched.Session, meet: Callable[[str], None]) -> None:
    """Have :class:`AverageLogs` call the method ``meet`` at the end of each epoch, before it waits for other ranks. ``meet``
    gets a text that says which epoch ends.

    Without it, a rank that has fewer batches would wait there while other ranks wait for its gradients.
    """
    _meetings[session] = [*(known for known in _meetings.get(session, ()) if known() is not None), WeakMethod(meet)]


def hook_fit(session: commsched.Session, model: Any, averages: Callable[[Any], bool]) -> None:
    """Have ``model.fit`` begin its callbacks with an :class:`AverageLogs`, until :func:`leave_fit`.

    If ``train_step`` is Keras's own, ``fit`` and ``train_on_batch`` also refuse an optimizer for which ``averages`` returns
    False.
    """
    _hook_callbacks(session, model)
    if type(model).train_step is not keras.Model.train_step:  # a step of the user's own may use other optimizers
        return
    make = model.make_train_function

    @functools.wraps(make)
    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        used = [model.optimizer, getattr(model.optimizer, "inner_optimizer", None)]
        if model.optimizer is not None and not any(map(averages, used)):
            raise UnsupportedError(
                f"the model '{model.name}' was compiled with another optimizer than the one that was given to "
                "ScheduledOptimizer, so it would be trained without averaging: compile it with that one, or call its detach()"
            )
        return make(*args, **kwargs)

    object.__setattr__(model, "make_train_function", make_train_function)


def _hook_callbacks(session: commsched.Session, model: Any) -> None:
    own = model.fit
    signature = inspect.signature(own)
    if "callbacks" not in signature.parameters:  # a fit of the user's own
        return

    @functools.wraps(own)
    def fit(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments["callbacks"] = _with_average(session, given.arguments.get("callbacks"))
        return own(*given.args, **given.kwargs)

    # An attribute of the object is found before the method of the class. It is neither saved nor copied with the model.
    object.__setattr__(model, "fit", fit)


def leave_fit(model: Any) -> None:
    """Undo :func:`hook_fit`. No-op if it has changed nothing."""
    for name in ("fit", "make_train_function"):
        vars(model).pop(name, None)


def _with_average(session: commsched.Session, callbacks: Any) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        listed = callbacks.callbacks
    else:
        listed = callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
    if not any(isinstance(each, AverageLogs) for each in listed):
        listed.insert(0, AverageLogs(session))
    return callbacks


def _number(value: Any) -> float | None:
    """``value`` as a float; None if it is not a number, so that every rank keeps its own value."""
    try:
        array = np.asarray(value)
        return float(array) if array.ndim == 0 and array.dtype.kind in "fiub" else None
    except (TypeError, ValueError):
        return None
