"""Hugging Face Accelerate plugin: an ``Accelerator`` that uses ScheduledOptimizer instead of DistributedDataParallel.

    from commsched.plugins.accelerate import Accelerator

Everything else of Accelerate stays: its process group (for ``gather`` and the like), data loaders, schedulers and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

try:
    import accelerate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this plugin needs Hugging Face Accelerate: pip install "commsched[accelerate]"', name="accelerate"
    ) from error

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch.utils.weak import WeakTensorKeyDictionary

import commsched

from ..core.errors import ConfigError, UnsupportedError
from .torch import ScheduledOptimizer
from .torch.initial_state import broadcast_model, parameters_of

__all__ = ["Accelerator"]

#: The ScheduledOptimizers made by this module that still average their gradients.
_attached: WeakSet[ScheduledOptimizer] = WeakSet()

#: Parameters of prepared models that no attached optimizer has, each with the handle of the hook that refuses its gradient.
_unaveraged = WeakTensorKeyDictionary()


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """As ``accelerate.Accelerator``, but models are not wrapped, and a prepared optimizer contains a ScheduledOptimizer.

    An optimizer's gradients are averaged once all models whose parameters it has are prepared, too, in any order and in any
    number of calls. These models then hold rank 0's parameters and buffers. With one rank, or with ``COMMSCHED_DISABLE=1``,
    everything is as in Accelerate, DistributedDataParallel included. Make one on every rank, because it joins the job.

    Raises:
        UnsupportedError: Accelerate was launched or configured for something other than plain data parallelism; the message
            names it. It is also raised later: by ``backward`` if no prepared optimizer has a parameter of a prepared model, and
            by ``step`` of an optimizer whose model was not prepared.
        CommschedError: ``commsched.init()`` or ScheduledOptimizer failed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._join()

    @classmethod
    def adopt(cls, accelerator: accelerate.Accelerator) -> None:
        """Change an existing ``accelerate.Accelerator``, which has prepared nothing yet, into an accelerator of this class.

        Raises:
            UnsupportedError: as when making one; or ``accelerator`` is of a subclass.
        """
        if type(accelerator) is not accelerate.Accelerator:
            raise UnsupportedError(f"the accelerator is a {type(accelerator).__qualname__}, not accelerate.Accelerator")
        accelerator.__class__ = cls
        accelerator._join()

    def _join(self) -> None:
        self._session: commsched.Session | None = None  # None: everything is as in Accelerate
        self._trained: list[torch.nn.Module] = []  # models prepared for training, as prepare_model() returned them
        self._preparing = False
        session = commsched.init(device=str(self.device) if self.device.type == "cuda" else "cpu")
        if session.world_size == 1:
            return
        ours, theirs = (session.world_size, session.rank), (self.num_processes, self.process_index)
        if ours != theirs:
            raise UnsupportedError(
                f"Accelerate takes this for process {theirs[1]} of {theirs[0]}, but it is rank {ours[1]} of {ours[0]}, so data "
                "would not be shared out. Without GPUs, say Accelerator(cpu=True) or TrainingArguments(use_cpu=True); and "
                "start with torchrun, accelerate launch or commsched run, which set what torch.distributed needs"
            )
        _require_data_parallel(self)
        self._session = session

    @property
    def is_scheduled(self) -> bool:
        """Whether there are several ranks, so that gradients are averaged by commsched."""
        return self._session is not None

    # --- preparing ---

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in Accelerate. Collective, in the same order on every rank."""
        self._preparing = True
        try:
            result = super().prepare(*args, **kwargs)
        finally:
            self._preparing = False
        self._schedule()
        return result

    def prepare_model(self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As in Accelerate, except that the model is not wrapped, unless it is compiled."""
        if self._session is None or evaluation_mode:
            return super().prepare_model(model, device_placement, evaluation_mode)
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not any(model is known for known in self._trained):
            self._trained.append(model)
        self._schedule()
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """As in Accelerate."""
        if self._session is None:
            return super().prepare_optimizer(optimizer, device_placement)
        if isinstance(optimizer, ScheduledOptimizer):
            raise ConfigError("give prepare() your own optimizer: it makes a ScheduledOptimizer of it")
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self.has_lomo_optimizer:
            raise UnsupportedError(
                f"{type(prepared.optimizer).__name__} updates within backward, before gradients are averaged"
            )
        prepared.__class__ = _PreparedOptimizer  # changed in place: it only adds a check, and may have been prepared before
        self._schedule()
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """As in Accelerate."""
        prepared = super().prepare_scheduler(scheduler)
        for optimizer in self._optimizers:  # Accelerate compares optimizers and does not find one inside a ScheduledOptimizer
            inner = optimizer.optimizer
            if isinstance(inner, ScheduledOptimizer) and getattr(scheduler, "optimizer", None) is inner.optimizer:
                prepared.optimizers = [optimizer]
        return prepared

    def _schedule(self) -> None:
        """Schedule each optimizer whose models are all prepared, and refuse gradients that no optimizer averages."""
        if self._session is None or self._preparing:
            return
        places = {id(parameter): model for model in self._trained for parameter in model.parameters()}
        for optimizer in self._optimizers:
            if optimizer.optimizer in _attached:
                continue
            parameters = parameters_of(optimizer)
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            if all(id(parameter) in places for parameter in trained):
                inside = {id(places[id(parameter)]) for parameter in trained}
                self._attach(optimizer, [model for model in self._trained if id(model) in inside])
                _allow_gradients(parameters)
        for model in self._trained:
            self._refuse_unaveraged(model)

    def _attach(self, optimizer: _PreparedOptimizer, models: list[torch.nn.Module]) -> None:
        plain = optimizer.optimizer
        if isinstance(plain, ScheduledOptimizer):  # from an earlier training, and detached
            plain = plain.optimizer
        own = {id(parameter) for parameter in parameters_of(plain)}
        for other in list(_attached):
            if any(id(parameter) in own for parameter in parameters_of(other)):
                _detach(other)
        scheduled = ScheduledOptimizer(plain, models[0] if len(models) == 1 else torch.nn.ModuleList(models))
        _attached.add(scheduled)
        optimizer.__setstate__({"optimizer": scheduled})  # also takes over the scaler, if there is one
        optimizer.models = [self.unwrap_model(model, keep_torch_compile=False) for model in models]

    def _refuse_unaveraged(self, model: torch.nn.Module) -> None:
        """Refuse gradients of ``model`` that no optimizer averages. If it has parameters for such gradients, it gets rank 0's
        values, as Accelerate's wrapper would give it."""
        assert self._session is not None
        averaged = {id(parameter) for optimizer in _attached for parameter in parameters_of(optimizer)}
        unaveraged = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and id(parameter) not in averaged and parameter not in _unaveraged
        ]
        if unaveraged:
            broadcast_model(self._session, model, {})
        for name, parameter in unaveraged:
            refuse = partial(_refuse_gradient, name, type(model).__name__)
            _unaveraged[parameter] = parameter.register_post_accumulate_grad_hook(refuse)

    # --- training ---

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """As in Accelerate: backward passes within the context accumulate on this rank only. This includes the backward passes
        of other models with the same optimizer."""
        with ExitStack() as stack:
            if self._session is None:
                stack.enter_context(super().no_sync(model))
            else:
                model = self.unwrap_model(model, keep_torch_compile=False)
                for optimizer in self._optimizers:
                    if optimizer.optimizer in _attached and any(model is own for own in optimizer.models):
                        stack.enter_context(optimizer.optimizer.no_sync())
            yield

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """As in Accelerate, with one rank.

        Raises:
            UnsupportedError: there are several ranks. Ranks with more batches would wait for the others.
        """
        if self._session is not None:
            raise UnsupportedError("join_uneven_inputs: every rank must take the same number of steps; use even_batches=True")
        return super().join_uneven_inputs(joinables, even_batches)

    def free_memory(self, *objects: Any) -> Any:
        """As in Accelerate. Optimizers must be prepared again before they can be used."""
        for optimizer in self._optimizers:
            if optimizer.optimizer in _attached:
                _detach(optimizer.optimizer)
        _allow_gradients(parameter for model in self._trained for parameter in model.parameters())
        self._trained = []
        return super().free_memory(*objects)


class _PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Refuses to step while its gradients are not averaged."""

    models: Sequence[torch.nn.Module] = ()  # the models, unwrapped, whose gradients it averages

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if self.optimizer in _attached:
            super().step(closure)
        elif isinstance(self.optimizer, ScheduledOptimizer):
            raise UnsupportedError(
                "this optimizer does not average gradients any more, since free_memory() was called or another one with the "
                "same parameters was prepared; prepare it again"
            )
        else:
            raise UnsupportedError(
                "this optimizer has parameters of a model that was not prepared, so its gradients would not be averaged; give "
                "prepare() the model too"
            )


def _detach(optimizer: ScheduledOptimizer) -> None:
    optimizer.detach()
    _attached.discard(optimizer)


def _allow_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter in _unaveraged:
            _unaveraged.pop(parameter).remove()


def _refuse_gradient(name: str, model: str, parameter: torch.Tensor) -> None:
    if any(parameter is own for optimizer in _attached for own in parameters_of(optimizer)):
        return  # add_param_group() has added the parameter since
    raise UnsupportedError(
        f"parameter '{name}' of the prepared {model} has a gradient, but no prepared optimizer has the parameter, so it would "
        "not be averaged; prepare the optimizer too, or freeze the parameter with requires_grad_(False)"
    )


def _require_data_parallel(accelerator: accelerate.Accelerator) -> None:
    """Require plain data parallelism on CPUs or CUDA devices. Raises UnsupportedError if Accelerate is configured for something
    else."""
    kind = accelerator.distributed_type
    if kind not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise UnsupportedError(
            f"Accelerate is set to {kind.value}; only plain data parallelism, on CPUs or CUDA devices, is scheduled"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise UnsupportedError("parallelism_config: only plain data parallelism is scheduled")
    if accelerator.mixed_precision == "fp8":
        raise UnsupportedError("mixed_precision=fp8: its kernels would read parameters before their update")
    handler = accelerator.ddp_handler
    hook = DDPCommunicationHookType(handler.comm_hook if handler is not None else "no")
    if hook != DDPCommunicationHookType.NO:
        raise UnsupportedError(
            f"DistributedDataParallelKwargs(comm_hook='{hook.value}') is a hook of DistributedDataParallel; to send gradients "
            "in 16 bits, set COMMSCHED_WIRE=bfloat16"
        )
