"""ScheduledTrainer: Gluon's trainer, whose gradients are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

import commsched

from .described import describe, digest_numbers, digest_states, prepare
from .exchange import GradientExchange
from .initial import begin_from_rank_0
from .slot import require_averageable


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
        if isinstance(optimizer, mx.optimizer.Optimizer):
            prepare(optimizer)
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        parameters: list[Any] = list(params if isinstance(params, Sequence) else params.values())
        for parameter in parameters:
            if parameter.grad_req != "null":
                require_averageable(parameter)
        self._exchange = GradientExchange(session, parameters)
        try:
            begin_from_rank_0(session, parameters)
        except BaseException:
            self._exchange.let_go()
            raise

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
            self._exchange.average(describe(self.optimizer))

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
        optimizer = self.optimizer
        self._exchange.updated(optimizer.rescale_grad, optimizer.learning_rate, digest_numbers(optimizer))

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
            prepare(self.optimizer)  # it is the one that was saved
            self._exchange.done.loaded += digest_states(self._updaters[0].states)

    def detach(self) -> None:
        """Wait for all averages and let the parameters go: from now on this is ``gluon.Trainer``, on this rank alone.
        Collective.

        Raises:
            CommschedError: the session failed or was closed, or ranks have parted.
        """
        if self._exchange is not None:
            self._exchange.detach()
            self._exchange = None
