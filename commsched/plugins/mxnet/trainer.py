"""ScheduledTrainer: Gluon's trainer, whose gradients are averaged over all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

import commsched

from ...core.errors import UnsupportedError
from .exchange import GradientExchange
from .initial import begin_from_rank_0
from .slot import require_averageable

_SCALARS = (int, float, bool, str)


class ScheduledTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Average gradients over all ranks, front layers first, and let the next forward start layer by layer.

    In place of ``gluon.Trainer``, with one difference: averages take the place of the kvstore, so there is none::

        trainer = ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

    Every rank begins with rank 0's parameters. ``step(batch_size)`` queues averages and updates in MXNet's engine and returns;
    each is made when it can be, and whoever reads a parameter, a gradient or a state waits for exactly that one. Gradients are
    averaged, not added: ``batch_size`` is that of this rank, the same on all ranks, and the result is that of one process with
    the joint batch. With one rank, or with ``COMMSCHED_DISABLE=1``, this is ``gluon.Trainer``.

    Making one is collective: every rank does, in the same order. Use it from one thread.

    Args:
        params: the parameters, as for ``gluon.Trainer``. Their order is that of the layers as far as the first backward does
            not show it; ``collect_params()`` has it.
        optimizer: its name, or an ``mxnet.optimizer.Optimizer``.
        optimizer_params: as for ``gluon.Trainer``.
        session: a session other than that of ``commsched.init()``.

    Raises:
        UnsupportedError: a parameter cannot be averaged (sparse, bfloat16, not on cpu(0)); names it. Or the optimizer is SGLD.
        ManifestMismatch: the ranks' parameters differ; names what.
        ConfigError: a parameter belongs to another ScheduledTrainer, or two have one name.
        CommschedError: from ``commsched.init()``.
    """

    def __init__(
        self,
        params: Mapping[str, mx.gluon.Parameter] | mx.gluon.ParameterDict | Sequence[mx.gluon.Parameter],
        optimizer: str | mx.optimizer.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        *,
        session: commsched.Session | None = None,
    ) -> None:
        session = session or commsched.init()
        self._exchange: GradientExchange | None = None
        if session.world_size == 1:
            super().__init__(params, optimizer, optimizer_params)
            return
        if isinstance(optimizer, str):
            optimizer, optimizer_params = mx.optimizer.create(optimizer, **(optimizer_params or {})), None
        if isinstance(optimizer, mx.optimizer.SGLD):
            raise UnsupportedError("SGLD adds noise, which each rank would draw for itself: the ranks would part")
        if isinstance(optimizer, mx.optimizer.Optimizer):
            _update_each_alone(optimizer)
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        parameters: list[Any] = list(params if isinstance(params, Sequence) else params.values())
        for parameter in parameters:
            if parameter.grad_req != "null":
                require_averageable(parameter)
        self._exchange = GradientExchange(session, parameters)
        begin_from_rank_0(session, parameters)

    def allreduce_grads(self) -> None:
        """Have the gradients averaged; for clipping and the like before ``update``. Whoever reads one waits for its average.

        Raises:
            UnsupportedError: ranks have parted, or parameters changed so that they cannot be averaged; says how.
            ManifestMismatch: ranks train other parameters or by other optimizers; in the first step.
            CommschedError: the session failed or was closed.
        """
        if self._exchange is None:
            super().allreduce_grads()
        else:
            self._exchange.average(_describe(self.optimizer))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """As in Gluon, after :meth:`allreduce_grads`. With ``ignore_stale_grad``, a parameter that any rank has a new gradient
        of is updated on all; ranks without one count as zeros.

        Raises:
            UnsupportedError: the gradients are no averages.
        """
        if self._exchange is None:
            super().update(batch_size, ignore_stale_grad)
            return
        self._exchange.before_update(ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        scheduler = self.optimizer.lr_scheduler
        rate = self.optimizer.lr if scheduler is None else scheduler.base_lr
        self._exchange.updated(self.optimizer.rescale_grad, rate, self._digest_numbers())

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Average and update, each when it can be made; returns before. ``batch_size``: of this rank, the same on all.

        Raises:
            CommschedError: see :meth:`allreduce_grads`.
        """
        if self._exchange is None:
            super().step(batch_size, ignore_stale_grad)
            return
        self.allreduce_grads()
        self.update(batch_size, ignore_stale_grad)

    def load_states(self, fname: str) -> None:
        """As in Gluon; the same on all ranks, else the next step but one says so."""
        super().load_states(fname)
        if self._exchange is not None:
            _update_each_alone(self.optimizer)  # it is the one that was saved
            self._exchange.done.loaded += _digest(self._updaters[0].states)

    def _digest_numbers(self) -> int:
        numbers = _describe(self.optimizer)
        for key in ("lr", "lr_scheduler.base_lr"):  # compared by themselves
            numbers.pop(key, None)
        multiples = [(parameter.lr_mult, parameter.wd_mult) for parameter in self._params]
        digest = hashlib.blake2b(json.dumps([numbers, multiples], sort_keys=True).encode(), digest_size=5)
        return int.from_bytes(digest.digest(), "big")

    def detach(self) -> None:
        """Wait for all averages and let the parameters go: from now on this is ``gluon.Trainer``, on this rank alone.
        Collective.

        Raises:
            CommschedError: the session failed or was closed, or ranks have parted.
        """
        if self._exchange is not None:
            self._exchange.detach()
            self._exchange = None


def _update_each_alone(optimizer: mx.optimizer.Optimizer) -> None:
    """One update for each parameter: none waits for the average of another. (0, of an optimizer that knows no other, stays.)"""
    optimizer.aggregate_num = min(1, optimizer.aggregate_num)


def _describe(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Its class and the numbers it was made with, as JSON; ``rescale_grad`` is compared in each step."""
    numbers = {key: value for key, value in vars(optimizer).items() if isinstance(value, _SCALARS) and key != "rescale_grad"}
    scheduler = optimizer.lr_scheduler
    if scheduler is not None:
        numbers |= {f"lr_scheduler.{key}": value for key, value in vars(scheduler).items() if isinstance(value, _SCALARS)}
        numbers["lr_scheduler"] = type(scheduler).__name__
    return {"class": type(optimizer).__name__, **numbers}


def _digest(states: Mapping[int, Any]) -> int:
    """Of an updater's states: what pickle makes of equal ones may differ."""
    digest = hashlib.blake2b(digest_size=5)

    def add(state: Any) -> None:
        if isinstance(state, (tuple, list)):
            for each in state:
                add(each)
        elif state is not None:
            digest.update(state.asnumpy().tobytes())

    for index in sorted(states):
        digest.update(f"{index} ".encode())
        add(states[index])
    return int.from_bytes(digest.digest(), "big")
