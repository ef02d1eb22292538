"""TrainState: parameters and optimizer state, one update behind while its averages are on their way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import set_current_trace, take_current_trace

import commsched

from ...core.errors import UnsupportedError
from .exchange import NOTHING, GradientExchange
from .initial import broadcast_all, named_leaves, require_concrete
from .named_errors import named_errors
from .pending import Pending
from .specs import specs_of


class Training:
    """What states of one training share: the user's optimizer, the form of the parameters, the exchange (None: one rank)."""

    def __init__(self, tx: optax.GradientTransformation, params: Any, exchange: GradientExchange | None) -> None:
        self.tx = tx
        self.structure = jax.tree.structure(params)
        self.exchange = exchange
        self.apply: Callable[..., tuple[Any, Any]] = jax.jit(self.update)

    def update(self, gradients: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        """Parameters and optimizer state after one update by the user's optimizer.

        Raises:
            UnsupportedError: the optimizer needs more than these, such as the loss.
        """
        try:
            updates, opt_state = self.tx.update(gradients, opt_state, params)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise UnsupportedError(
                f"this optimizer needs more than gradients, and an update is made in another step than its loss: {error}"
            ) from error
        return optax.apply_updates(params, updates), opt_state


@jax.tree_util.register_pytree_with_keys_class
class TrainState:
    """What a training step takes and gives back: a pytree, to be passed through ``jit``, ``scan`` and the like.

    Made by :func:`create`. With several ranks its leaves lack the last update until the next step, so parameters are read by
    ``params`` and ``opt_state``, which have it: outside ``jit`` they wait for the averages, within it the program does.
    """

    def __init__(self, params: Any, opt_state: Any, outstanding: Any, training: Training) -> None:
        self._params = params
        self._opt_state = opt_state
        self._outstanding = outstanding  # the number of the round whose averages are to be applied
        self._training = training
        self._trace = _current_trace() if isinstance(outstanding, jax.core.Tracer) else None  # of the program that has it
        self._seen: _Seen | None = None

    @property
    def params(self) -> Any:
        """The parameters, with all updates. See :func:`synchronize` for what it raises."""
        return synchronize(self)._params

    @property
    def opt_state(self) -> Any:
        """The optimizer's state, with all updates. See :func:`synchronize` for what it raises."""
        return synchronize(self)._opt_state

    def remember(self, synchronized: TrainState) -> None:
        """Let it be what whoever reads this state in this program gets, if the program is that which has it."""
        if self._trace is not None and self._trace is _current_trace():
            self._seen = _Seen(synchronized)

    def latest(self) -> TrainState:
        """This state, or what was made of it, to go on from."""
        if self._seen is None:
            return self
        if self._trace is not None:  # a program cannot ask for the averages again
            return self._seen.state
        # If it was only read, the program of the step makes the update, so that ranks which have not read it get the same bits.
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
    """``state``, with no update outstanding, as the user got it, who may have changed it in place since."""

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
    """The state to begin with: rank 0's ``params`` and optimizer state, on every rank. Collective; not within ``jit``.

    Args:
        params: a pytree of floating-point arrays.
        tx: the optimizer, from Optax or like one.
        opt_state: its state, from a checkpoint say; by default that of ``tx.init(params)``.
        session: a session other than that of ``commsched.init()``.

    Raises:
        UnsupportedError: a parameter has a dtype or lies on a device that is not supported; names it.
        ManifestMismatch: ranks have different parameters or optimizer states; names the first.
        CommschedError: from ``commsched.init()``.
    """
    session = commsched.init() if session is None else session
    named = named_leaves(params)
    require_concrete(named, "cs.create()")
    exchange = None
    if session.world_size > 1:
        specs = specs_of(named)
        opt_state = tx.init(params) if opt_state is None else opt_state
        params, opt_state = broadcast_all(session, {"": params, "optimizer state ": opt_state})
        exchange = GradientExchange(session, specs)
    elif opt_state is None:
        opt_state = tx.init(params)
    return TrainState(params, opt_state, _nothing(params), Training(tx, params, exchange))


def synchronize(state: TrainState) -> TrainState:
    """``state`` with no update outstanding: it may be kept, saved, copied, and stepped from more than once.

    Outside ``jit`` it waits for the averages of the last step; within, the program waits for all of them where they are used.
    Step from what it gives on all ranks or on none: another program makes the update, which may round otherwise.

    Raises:
        UnsupportedError: the averages are gone, since another step was made from ``state``, or were never here.
        CommschedError: the session failed.
    """
    exchange = state._training.exchange
    if exchange is None:
        return state
    if state._seen is None:
        if state._trace is not None:
            with set_current_trace(state._trace):  # not the branch or the inner function that reads it
                pending = Pending(exchange, state._training.update, state._params, state._opt_state, state._outstanding)
                params, opt_state, passed = pending.finish()
                state._seen = _Seen(TrainState(params, opt_state, passed, state._training))
        else:
            with named_errors(), jax.ensure_compile_time_eval():  # whatever is being traced, this state is not
                number = int(state._outstanding)
                if number == NOTHING:
                    return state
                averages = jax.tree.unflatten(state._training.structure, exchange.averages(number))
                params, opt_state = state._training.apply(averages, state._opt_state, state._params)
                state._seen = _Seen(TrainState(params, opt_state, _nothing(params), state._training))
    return state._seen.state


def _current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


def _nothing(params: Any) -> Any:
    """Committed to a device if the parameters are: else the second step would be compiled anew, as its state is then."""
    number = jnp.int32(NOTHING)
    first = next(iter(jax.tree.leaves(params)), None)
    return jax.device_put(number, first.sharding) if isinstance(first, jax.Array) and first.committed else number
