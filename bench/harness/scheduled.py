"""The shared part of all systems on commsched: one model under one ScheduledOptimizer, whose configuration changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

import commsched.plugins.torch as cs
from commsched import SchedulerConfig, TransportError

from .reference import LEARNING_RATE, put_weights, weights_of
from .system import Context, Setup
from .timeline import Recorder

#: Steps between two questions whether sizes are chosen.
_STEPS_TO_ASK = 4


class Training:
    """The model and its optimizer."""

    def __init__(self, context: Context) -> None:
        self.model = context.workload.make_model()
        self.initial = weights_of(self.model)
        self.optimizer = cs.ScheduledOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE), self.model, session=context.session
        )
        self._fresh = True

    def reset(self) -> None:
        """Restore the initial weights."""
        # Not before the first step: the plugin learns the order of the layers from the first reading of the weights.
        if not self._fresh:
            put_weights(self.model, self.initial)
        self._fresh = False


class ScheduledSystem:
    """A configuration of the scheduler; see ``bench.harness.system.System``.

    Args:
        barrier: whether every average is written before the next forward begins.
        late_norm: whether a loop that clips leaves it to commsched how long to wait for the norm. Otherwise it waits for all
            averages before it clips, as a loop on the peer that the system stands for has to.
        hold: whether nothing is sent before backward has ended.
        words: a description for readers, instead of the partition and the credit.
    """

    def __init__(
        self,
        context: Context,
        wanted: SchedulerConfig,
        *,
        barrier: bool = False,
        hold: bool = False,
        late_norm: bool = False,
        words: str | None = None,
    ) -> None:
        self._context = context
        self._training = context.shared(Training)
        self._wanted = wanted
        self._barrier = barrier
        self._hold = hold
        self._loop = context.make_loop()
        self._waits_to_clip = self._loop.clips and not late_norm
        self.model = self._training.model
        self.initial = self._training.initial
        self.setup = Setup(
            context.carrier.transport,
            _words(wanted, words or f"partition {megabytes(wanted.partition_bytes)}, credit {megabytes(wanted.credit_bytes)}"),
            context.message_seconds,
            wanted.partition_bytes,
            wanted.credit_bytes,
            wanted.fusion_bytes,
        )

    def begin(self) -> None:
        self._training.reset()
        self._context.barrier.switch(self._wanted)

    def require_ready(self) -> None:
        config = self._context.session.core.config
        if config != self._wanted:
            raise TransportError(f"rank {self._context.session.rank} runs {config}, but {self._wanted} was to be measured")
        if self._wanted.order == "static" and not self._context.session.core.is_static:
            raise TransportError(
                f"rank {self._context.session.rank} launches in an agreed order, but a static one was to be measured: its "
                "order does not repeat itself; compare with +agreed"
            )

    def forward(self, step: int) -> torch.Tensor:
        self._training.optimizer.zero_grad()
        return self._context.workload.loss(self.model, step, self._context.session.rank)

    def update(self, loss: torch.Tensor) -> None:
        optimizer = self._training.optimizer
        self._loop.backward(loss, optimizer.no_sync() if self._hold else nullcontext())
        if self._waits_to_clip:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.detach()  # waits for the average
        self._loop.step(self.model, optimizer)
        if self._barrier:
            optimizer.synchronize()

    def end(self) -> None:
        self._training.optimizer.synchronize()

    def observe(self, recorder: Recorder) -> None:
        # The observer stays attached, because transport threads may be about to call it. A stopped recorder costs nothing.
        self._context.session.core.observers = (recorder,)


def chosen_sizes(context: Context) -> SchedulerConfig:
    """The configuration of a job that sets what this one sets: train until partition, credit and order have chosen themselves,
    and stop choosing. Collective. What is set stays."""
    session = context.session
    if not session.gather(session.is_settled)[0]:
        _train_until_settled(context)
    session.stop_tuner()
    return SchedulerConfig(**session.gather(session.core.next_config.to_record())[0])


def _train_until_settled(context: Context) -> None:
    session, training = context.session, context.shared(Training)
    context.barrier.switch(replace(session.core.next_config, collective=context.carrier.collective))
    training.reset()
    loop = context.make_loop()
    step = 0
    while not session.gather(session.is_settled)[0]:
        for _ in range(_STEPS_TO_ASK):
            training.optimizer.zero_grad()
            loop.backward(context.workload.loss(training.model, step, session.rank))
            loop.step(training.model, training.optimizer)
            step += 1
    training.optimizer.synchronize()


def commsched_config(context: Context) -> SchedulerConfig:
    """The configuration of commsched, for systems that differ from it in one respect."""
    current = context.session.core.config
    return replace(
        current,
        partition_bytes=context.partition_bytes,
        credit_bytes=context.credit_bytes,
        policy="priority",
        fusion_bytes=None,
        collective=context.carrier.collective,
        order=context.order,
    )


def _words(config: SchedulerConfig, sizes: str) -> str:
    """``sizes`` with the collective and the order added if they are not the default, for readers."""
    split = ", reduce-scatter and all-gather" if config.collective == "rsag" else ""
    return sizes + split + (", static order" if config.order == "static" else "")


def megabytes(nbytes: int) -> str:
    """Format a size in megabytes, for readers."""
    return f"{nbytes / 1e6:.3g} MB"
