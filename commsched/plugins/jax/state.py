"""TrainState: parameters and optimizer state, one update behind while its averages are outstanding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NoReturn

import jax
import numpy as np
import optax
from jax.extend.core import set_current_trace, take_current_trace

import commsched

from ...core.errors import UnsupportedError
from .exchange import NOTHING, GradientExchange
from .host_call import named_errors
from .leaves import broadcast_all, named_leaves, require_concrete, specs_of
from .memory import device_at, place_of, session_for
from .update import Pending


class Training:
    """The parts that the states of one training share: the user's optimizer, the form of the parameters, and the exchange.

    The exchange is None with one rank.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any, exchange: GradientExchange | None) -> None:
        self.tx = tx
        self.structure = jax.tree.structure(params)
        self.exchange = exchange
        self.apply: Callable[..., tuple[Any, Any]] = jax.jit(self.update)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a TrainState belongs to this process; save state.params and state.opt_state, and go on from them with "
            "cs.create(params, tx, opt_state=opt_state)"
        )

    def update(self, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """Parameters and optimizer state after one update by the user's optimizer. Raises UnsupportedError if the optimizer
        needs more than these, such as the loss."""
        try:
            updates, opt_state = self.tx.update(gradients, opt_state, params)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise UnsupportedError(
                f"this optimizer needs more than gradients, but an update runs in a later step than its loss: {error}"
            ) from error
        return optax.apply_updates(params, updates), opt_state


@jax.tree_util.register_pytree_with_keys_class
class TrainState:
    """The state that a training step takes and returns: a pytree that can pass through ``jit``, ``scan`` and the like.

    :func:`create` makes the first state. With several ranks, its leaves lack the last update until the next step. So read
    ``params`` and ``opt_state``, which include it. Outside ``jit`` they wait for the averages; within it the program waits.
    """

    def __init__(self, params: Any, opt_state: Any, outstanding: Any, training: Training) -> None:
        self._params = params
        self._opt_state = opt_state
        self._outstanding = outstanding  # the number of the round whose averages are yet to be applied
        self._training = training
        self._trace = _current_trace() if isinstance(outstanding, jax.core.Tracer) else None  # of the program that it is in
        self._seen: _Seen | None = None

    @property
    def params(self) -> Any:
        """The parameters with all updates. Raises as :func:`synchronize`."""
        return synchronize(self)._params

    @property
    def opt_state(self) -> Any:
        """The optimizer's state with all updates. Raises as :func:`synchronize`."""
        return synchronize(self)._opt_state

    def remember(self, synchronized: TrainState) -> None:
        """Use ``synchronized`` for later reads of this state in the program that is being traced, if this state is in it."""
        if self._trace is not None and self._trace is _current_trace():
            self._seen = _Seen(synchronized)

    def latest(self) -> TrainState:
        """The state to step from: this state, or the synchronized state that was made from it."""
        if self._seen is None:
            return self
        if self._trace is not None:  # a program cannot ask for the averages again
            return self._seen.state
        # If it was only read, the program of the step makes the update, so that ranks that have not read it get the same bits.
        return self._seen.state if self._seen.changed() else self

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Training]:
        names = ("params_before_update", "opt_state_before_update", "outstanding")
        latest = self.latest()
        values = (latest._params, latest._opt_state, latest._outstanding)
        return tuple((jax.tree_util.GetAttrKey(name), value) for name, value in zip(names, values)), self._training

    @classmethod
    def tree_unflatten(cls, training: Training, children: Sequence[Any]) -> TrainState:
        params, opt_state, outstanding = children
        return cls(params, opt_state, outstanding, training)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        leaves, structure = jax.tree.flatten(synchronize(self))
        copied: TrainState = jax.tree.unflatten(structure, copy.deepcopy(leaves, memo))
        return copied

    def __repr__(self) -> str:
        return f"<TrainState of {self._training.structure.num_leaves} parameters>"


class _Seen:
    """A ``state`` with no update outstanding that the user has read, and may have modified in place since."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self._leaves, self._structure = jax.tree.flatten((state._params, state._opt_state))

    def changed(self) -> bool:
        leaves, structure = jax.tree.flatten((self.state._params, self.state._opt_state))
        return structure != self._structure or any(now is not then for now, then in zip(leaves, self._leaves))


def create(
    params: Any,
    tx: optax.GradientTransformation,
    *,
    opt_state: Any = None,
    session: commsched.Session | None = None,
) -> TrainState:
    """The initial state: rank 0's ``params`` and optimizer state, on every rank. Collective; do not call it within ``jit``.

    Args:
        params: a pytree of floating-point arrays.
        tx: the optimizer, from Optax or with the same interface.
        opt_state: the optimizer's state, for example from a checkpoint; ``tx.init(params)`` by default.
        session: a session other than the one that ``commsched.init()`` returns.

    Raises:
        UnsupportedError: a parameter has a dtype or lies on a device that is not supported; names it.
        ManifestMismatch: ranks have different parameters or optimizer states; names the first.
        ConfigError: the parameters are on a GPU, and cupy is missing.
        CommschedError: from ``commsched.init()``.
    """
    named = named_leaves(params)
    require_concrete(named, "cs.create()")
    session = session_for(named) if session is None else session
    exchange = None
    if session.world_size > 1:
        specs = specs_of(named)
        device = device_at(place_of(named), session)
        opt_state = tx.init(params) if opt_state is None else opt_state
        params, opt_state = broadcast_all(session, {"": params, "optimizer state ": opt_state})
        exchange = GradientExchange(session, specs, device, makes_update=True)
    elif opt_state is None:
        opt_state = tx.init(params)
    return TrainState(params, opt_state, _nothing(params), Training(tx, params, exchange))


def synchronize(state: TrainState) -> TrainState:
    """``state`` with no update outstanding. The result may be kept, saved, copied, and stepped from more than once.

    Outside ``jit`` it waits for the averages of the last step. Within ``jit`` the program waits for them where they are used.
    Step from the result on all ranks or on none: it is computed by another program, which may round differently.

    Raises:
        UnsupportedError: the averages are gone, since another step was made from ``state``, or were never in this process.
        CommschedError: the session failed.
    """
    exchange = state._training.exchange
    if exchange is None:
        return state
    if state._seen is None:
        if state._trace is not None:
            with set_current_trace(state._trace):  # not the trace of a branch or inner function that reads the state
                pending = Pending(exchange, state._training.update, state._params, state._opt_state, state._outstanding)
                params, opt_state, passed = pending.finish()
                state._seen = _Seen(TrainState(params, opt_state, passed, state._training))
        else:
            with named_errors(), set_current_trace(_no_trace()):  # this state is not traced, even if something else is
                number = int(state._outstanding)
                if number == NOTHING:
                    return state
                averages = jax.tree.unflatten(state._training.structure, jax.device_put(exchange.averages(number)))
                params, opt_state = state._training.apply(averages, state._opt_state, state._params)
                state._seen = _Seen(TrainState(params, opt_state, _nothing(params), state._training))
    return state._seen.state


def _current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


@cache
def _no_trace() -> Any:
    """The trace of a thread that traces nothing. While it is the current trace, everything is computed at once."""
    # ``ensure_compile_time_eval`` would also compute constants of the update's program at once, and so transfer them.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_current_trace).result()


def _nothing(params: Any) -> Any:
    """``NOTHING`` as an array, committed to a device if the parameters are. Otherwise the second step would be compiled anew,
    since its state is committed."""
    first = next(iter(jax.tree.leaves(params)), None)
    return jax.device_put(np.int32(NOTHING), first.sharding if isinstance(first, jax.Array) and first.committed else None)
