"""Hugging Face Transformers plugin: a ``Trainer`` that uses ScheduledOptimizer instead of DistributedDataParallel.

    from commsched.plugins.transformers import Trainer

or, for a subclass of Trainer, ``class MyTrainer(ScheduledTrainerMixin, Seq2SeqTrainer): ...``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this plugin needs Hugging Face Transformers: pip install "commsched[transformers]"', name="transformers"
    ) from error

import torch
from transformers.trainer_utils import IntervalStrategy

import commsched

from ..core.errors import UnsupportedError
from .accelerate import Accelerator

__all__ = ["ScheduledTrainerMixin", "Trainer"]

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class ScheduledTrainerMixin(_Base):
    """Mixin for ``transformers.Trainer`` or a subclass of it, to be named before it among the base classes. The accelerator of
    the trainer becomes the ``Accelerator`` of ``plugins.accelerate``, and its logs of the training have ``Session.scalars``.

    Raises:
        UnsupportedError: see ``commsched.plugins.accelerate.Accelerator``; or ``auto_find_batch_size`` is set; or the job is
            elastic.
    """

    def create_accelerator_and_postprocess(self) -> None:
        if commsched.is_elastic():
            raise UnsupportedError(
                "a Trainer of Transformers cannot be elastic, since it has a loop of its own: start it without --elastic and "
                "resume with train(resume_from_checkpoint=True), or write the loop with commsched.plugins.accelerate"
            )
        super().create_accelerator_and_postprocess()
        Accelerator.adopt(self.accelerator)
        if self.accelerator.is_scheduled and self.args.auto_find_batch_size:
            raise UnsupportedError(
                "auto_find_batch_size: a rank that alone runs out of memory would begin again without the others"
            )

    def log(self, logs: dict[str, float], *arguments: Any, **more: Any) -> None:
        if "loss" in logs and self.accelerator.is_scheduled:
            logs = {**logs, **self.accelerator.scalars()}
        super().log(logs, *arguments, **more)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        # With max_grad_norm=0 the norm is for the log only, and computing it waits for all averages.
        if grad_norm is None and self.accelerator.is_scheduled and not self._logs_after_this_step():
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]

    def _logs_after_this_step(self) -> bool:
        """Whether the trainer logs after this step, by the rule of ``transformers.trainer_callback.DefaultFlowCallback``."""
        step = self.state.global_step + 1
        if self.args.logging_strategy == IntervalStrategy.STEPS:
            return step % self.state.logging_steps == 0 or (step == 1 and self.args.logging_first_step)
        return self.args.logging_strategy == IntervalStrategy.EPOCH


class Trainer(ScheduledTrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` with the accelerator of ``plugins.accelerate``."""
