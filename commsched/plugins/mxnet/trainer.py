"""ScheduledTrainer: a Gluon trainer that averages gradients over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx

import commsched

from .agreement import describe_optimizer, digest_states, numbers_of, prepare_optimizer
from .exchange import GradientExchange
from .parameters import begin_from_rank_0, require_averageable, require_same_parameters


class ScheduledTrainer(mx.gluon.Trainer):  # type: ignore[misc]
    """Averages gradients over all ranks, front layers first, and lets the next forward start layer by layer.

    Use it instead of ``gluon.Trainer``. There is one difference: averages replace the kvstore, so there is no kvstore::

        trainer = ScheduledTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

    Every rank begins with rank 0's parameters. ``step(batch_size)`` queues averages and updates in MXNet's engine and returns.
    The engine runs each of them as early as possible. A read of a parameter, a gradient or a state waits for the operation
    that writes it, and for no other. Gradients are averaged, not summed: ``batch_size`` is the batch size of this rank and must
    be the same on all ranks. The result equals the training of one process with the joint batch. With one rank, or with
    ``COMMSCHED_DISABLE=1``, this class behaves like ``gluon.Trainer``.

    The constructor is collective: every rank must call it, in the same order. Use the trainer from one thread.

    Args:
        params: the parameters, as for ``gluon.Trainer``. Where the first backward does not show the order of the layers, the
            order of ``params`` counts; ``collect_params()`` returns the order of the layers.
        optimizer: the optimizer's name, or an ``mxnet.optimizer.Optimizer``.
        optimizer_params: as for ``gluon.Trainer``.
        session: the session to use instead of the session of ``commsched.init()``.

    Raises:
        UnsupportedError: a parameter cannot be averaged (sparse, bfloat16, not on cpu(0)); names it. Or the optimizer is SGLD.
        ManifestMismatch: the parameters of the ranks differ. Names the difference.
        ConfigError: a parameter belongs to another ScheduledTrainer, or two parameters have the same name.
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
            prepare_optimizer(optimizer)
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        parameters: list[Any] = list(params if isinstance(params, Sequence) else params.values())
        for parameter in parameters:
            if parameter.grad_req != "null":
                require_averageable(parameter)
        exchange = GradientExchange(session, parameters)
        require_same_parameters(session, parameters)
        exchange.take_over()
        self._exchange = exchange
        begin_from_rank_0(session, parameters)

    def allreduce_grads(self) -> None:
        """Queue the averages of the gradients, for example to clip them before ``update``.

        A read of a gradient waits for its average.

        Raises:
            RanksDiverged: ranks did different things, or their weights differ. Says which.
            UnsupportedError: parameters changed so that they cannot be averaged. Says how.
            ManifestMismatch: ranks train different parameters or with different optimizers. In the first step only.
            CommschedError: the session failed or was closed.
        """
        if self._exchange is None:
            super().allreduce_grads()
        else:
            self._exchange.average(describe_optimizer(self.optimizer))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update as Gluon's trainer does. Call it after :meth:`allreduce_grads`.

        With ``ignore_stale_grad``, a parameter that has a new gradient on any rank is updated on all ranks. A rank without a
        new gradient contributes zeros.

        Raises:
            UnsupportedError: a gradient is not an average.
        """
        if self._exchange is None:
            super().update(batch_size, ignore_stale_grad)
            return
        self._exchange.before_update(ignore_stale_grad)
        super().update(batch_size, ignore_stale_grad)
        self._exchange.updated(numbers_of(self.optimizer))

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Queue averages and updates, and return before they are made.

        Args:
            batch_size: the batch size of this rank. It must be the same on all ranks.
            ignore_stale_grad: see :meth:`update`.

        Raises:
            CommschedError: see :meth:`allreduce_grads`.
        """
        if self._exchange is None:
            super().step(batch_size, ignore_stale_grad)
            return
        self.allreduce_grads()
        self.update(batch_size, ignore_stale_grad)

    def load_states(self, fname: str) -> None:
        """Load the optimizer's states, as Gluon's trainer does.

        All ranks must load the same states. Otherwise the step after the next one raises ``RanksDiverged``.
        """
        super().load_states(fname)
        if self._exchange is not None:
            prepare_optimizer(self.optimizer)  # the saved file has replaced the optimizer
            self._exchange.done.loaded += digest_states(self._updaters[0].states)

    def detach(self) -> None:
        """Wait for all averages and release the parameters. Collective.

        From then on this trainer behaves like ``gluon.Trainer``, on this rank alone.

        Raises:
            CommschedError: the session failed or was closed, or ranks diverged.
        """
        if self._exchange is not None:
            self._exchange.detach()
            self._exchange = None
