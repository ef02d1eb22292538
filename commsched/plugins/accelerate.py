"""Hugging Face Accelerate plugin: an ``Accelerator`` that uses ScheduledOptimizer instead of DistributedDataParallel.

    from commsched.plugins.accelerate import Accelerator

Everything else of Accelerate stays: its process group (for ``gather`` and the like), data loaders, schedulers and checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

try:
    import accelerate
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this plugin needs Hugging Face Accelerate: pip install "commsched[accelerate]"', name="accelerate"
    ) from error

import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import PartialState
from accelerate.utils import DDPCommunicationHookType, DistributedType, patch_environment

import commsched

from ..core.errors import ConfigError, UnsupportedError
from .torch import Join, ScheduledOptimizer, process_group
from .torch.elastic import ElasticPart
from .torch.initial_state import parameters_of

if TYPE_CHECKING:
    from ..session.elastic import Keep

__all__ = ["Accelerator"]

#: The ScheduledOptimizers made by this module that still average their gradients.
_attached: WeakKeyDictionary[ScheduledOptimizer, None] = WeakKeyDictionary()  # in the order of their making, as on all ranks

#: Those that average gradients of prepared models which are in no prepared optimizer.
_averagers: WeakKeyDictionary[ScheduledOptimizer, None] = WeakKeyDictionary()

#: The Accelerator that has prepared each optimizer.
_owners: WeakKeyDictionary[AcceleratedOptimizer, ref[Accelerator]] = WeakKeyDictionary()

_DATA_PARALLEL = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # Accelerate has no types
    """As ``accelerate.Accelerator``, but models are not wrapped, and a prepared optimizer contains a ScheduledOptimizer.

    An optimizer's gradients are averaged once all models whose parameters it has are prepared, too, in any order and in any
    number of calls, and so are gradients of prepared models that no prepared optimizer has. These models then hold rank 0's
    parameters and buffers. With one rank, or with ``COMMSCHED_DISABLE=1``, everything is as in Accelerate,
    DistributedDataParallel included. Make one on every rank, because it joins the job.

    Under ``commsched run --elastic``, ``commsched.Elastic`` takes the prepared optimizer. Rank, number of ranks and process
    group of Accelerate are then those of each generation, and data loaders are prepared anew in its first step.

    Raises:
        UnsupportedError: Accelerate was launched or configured for something other than plain data parallelism; the message
            names it. It is also raised later, by ``step`` of an optimizer whose model was not prepared.
        CommschedError: ``commsched.init()`` or ScheduledOptimizer failed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as stack:
            if commsched.is_elastic():
                session = commsched.init()  # it says which rank this is now; a new process cannot meet the others otherwise
                if session.disabled:
                    raise UnsupportedError(
                        "disable=1 in an elastic job: Accelerate's own DistributedDataParallel does not outlive the loss of a "
                        "rank; start the job without --elastic"
                    )
                process_group.renew(session)
                # Accelerate takes the initialised process group, and looks at these variables only to see that there is one.
                world = {"rank": session.rank, "world_size": session.world_size, "master_addr": "none"}
                stack.enter_context(patch_environment(**world))
            super().__init__(*args, **kwargs)
            if commsched.is_elastic():
                self._take_place(session)
        self._join()

    @classmethod
    def adopt(cls, accelerator: accelerate.Accelerator) -> None:
        """Change an existing ``accelerate.Accelerator``, which has prepared nothing yet, into an accelerator of this class.

        Raises:
            UnsupportedError: as when making one; or ``accelerator`` is of a subclass; or the job is elastic.
        """
        if commsched.is_elastic():
            raise UnsupportedError(
                "an accelerator that exists already cannot follow the ranks of an elastic job: make one of this class"
            )
        if type(accelerator) is not accelerate.Accelerator:
            raise UnsupportedError(f"the accelerator is a {type(accelerator).__qualname__}, not accelerate.Accelerator")
        accelerator.__class__ = cls
        accelerator._join()

    def _join(self) -> None:
        self._session: commsched.Session | None = None  # None: everything is as in Accelerate
        self._trained: list[torch.nn.Module] = []  # models prepared for training, as prepare_model() returned them
        self._averagers: list[tuple[ScheduledOptimizer, torch.nn.Module]] = []  # each with its model, as prepared
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

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has nothing to average: it joins the job again, and models must be prepared again."""
        ours = ("_session", "_trained", "_averagers", "_preparing")
        return {name: value for name, value in self.__dict__.items() if name not in ours}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._join()

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
            prepared = super().prepare_optimizer(optimizer, device_placement)
            if type(prepared) is AcceleratedOptimizer:
                prepared.__class__ = _OptimizerOfOneRank
            return prepared
        if isinstance(optimizer, ScheduledOptimizer):
            raise ConfigError("give prepare() your own optimizer: it makes a ScheduledOptimizer of it")
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self.has_lomo_optimizer:
            raise UnsupportedError(
                f"{type(prepared.optimizer).__name__} updates within backward, before gradients are averaged"
            )
        _owners[prepared] = ref(self)
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

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare it as Accelerate does. In an elastic job the result is for the ranks of now; used with others, it raises
        UnsupportedError."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self._generation is not None and not hasattr(prepared.base_dataloader, "_commsched_made_for"):
            self._bind(prepared, self._generation)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skip them as Accelerate does. The result is for the same ranks as ``dataloader``."""
        skipping = super().skip_first_batches(dataloader, num_batches)
        made_for = getattr(getattr(dataloader, "base_dataloader", None), "_commsched_made_for", None)
        if made_for is not None:
            self._bind(skipping, made_for[1])
        return skipping

    def _bind(self, loader: Any, generation: int) -> None:
        """Let nobody take batches of ``loader``, which was prepared for the ranks of ``generation``, in another one."""
        if isinstance(loader, DataLoaderDispatcher) or isinstance(loader.dataset, torch.utils.data.IterableDataset):
            raise UnsupportedError(
                "in an elastic job a prepared data loader has a dataset with indices, and dispatch_batches=False: others "
                "cannot begin anew at a step. Take this one's batches by step.number and step.rank, without preparing it"
            )
        base = loader.base_dataloader
        kind: Any = type(base)
        base.__class__ = _of_one_generation(kind)
        base._commsched_made_for = self, generation

    @property
    def _generation(self) -> int | None:
        """The generation of an elastic job."""
        return None if self._session is None or self._session.place is None else self._session.place.generation

    # --- for commsched.Elastic ---

    def _require_can_be_elastic(self) -> None:
        if self.scaler is not None and self.scaler.is_enabled():
            raise UnsupportedError(
                "mixed_precision='fp16' cannot be elastic: the scale of a loss would differ between a new process and the "
                "others; use mixed_precision='bf16', or 'no'"
            )
        attached = [each for each in self._optimizers if each.optimizer in _attached]
        if len(attached) > 1:
            raise UnsupportedError(
                f"{len(attached)} optimizers are prepared, and an elastic job can have one: give it all parameters, in groups"
            )
        if self._averagers:
            raise UnsupportedError(
                f"the optimizer lacks parameters of a prepared {type(self._averagers[0][1]).__name__}, and cannot be elastic: "
                "freeze them, or give them to it"
            )

    def _begin_elastic_step(self) -> None:
        process_group.allow()
        if not self.sync_gradients:
            raise UnsupportedError(
                "gradients accumulate over several steps of Elastic, and would be lost with a rank: take all batches of one "
                "update, with accumulate(), in one step"
            )

    def _follow(self, session: commsched.Session) -> None:
        """Be one of the ranks of ``session``, another generation of the job, before its first step. Not collective."""
        process_group.renew(session)
        self._session = session
        self._take_place(session)
        self.step = 0  # of accumulate(): a step that was broken off may have left it in the midst of an update
        self.gradient_state._set_sync_gradients(True)
        for loader in [each for each in self.gradient_state.dataloader_references if each is not None]:
            self.gradient_state._remove_dataloader(loader)
        self._dataloaders.clear()

    def _take_place(self, session: commsched.Session) -> None:
        assert session.place is not None
        for state in (PartialState(), self.state):
            state.num_processes, state.process_index = session.world_size, session.rank
            # LOCAL_RANK, which has chosen the device, may be another number: it stays when ranks are counted anew.
            state.local_process_index = session.place.local_rank

    # --- optimizers of prepared models ---

    def _schedule(self) -> None:
        """Schedule each optimizer whose models are all prepared, and average the gradients that no optimizer averages."""
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
        self._averagers = [pair for pair in self._averagers if pair[0] in _averagers]
        for model in self._trained:
            self._average(model)

    def _attach(self, optimizer: _PreparedOptimizer, models: list[torch.nn.Module]) -> None:
        plain = optimizer.optimizer
        if isinstance(plain, ScheduledOptimizer):  # from an earlier training, and detached
            plain = plain.optimizer
        _detach_all_with(parameters_of(plain), [*_attached, *_averagers])
        scheduled = ScheduledOptimizer(plain, models[0] if len(models) == 1 else torch.nn.ModuleList(models))
        _attached[scheduled] = None
        optimizer.__setstate__({"optimizer": scheduled})  # also takes over the scaler, if there is one
        optimizer.models = [self.unwrap_model(model, keep_torch_compile=False) for model in models]

    def _average(self, model: torch.nn.Module) -> None:
        """Average the gradients of ``model`` that no prepared optimizer averages, as Accelerate's wrapper would. They stay in
        ``.grad``, for code that prepares no optimizer."""
        averaged = {id(parameter) for optimizer in [*_attached, *_averagers] for parameter in parameters_of(optimizer)}
        own = [each for each in model.parameters() if each.requires_grad and id(each) not in averaged]
        if own:
            averager = ScheduledOptimizer(torch.optim.SGD(own), model)  # whose step() is never called
            _averagers[averager] = None
            self._averagers.append((averager, model))

    def _scheduled(self, model: torch.nn.Module) -> list[ScheduledOptimizer]:
        """Return everything that averages gradients of the prepared ``model``."""
        model = self.unwrap_model(model, keep_torch_compile=False)
        pairs = [(each.optimizer, own) for each in self._optimizers if each.optimizer in _attached for own in each.models]
        pairs += [(each, self.unwrap_model(own, keep_torch_compile=False)) for each, own in self._averagers]
        return [each for each, own in pairs if own is model and (each in _attached or each in _averagers)]

    # --- training ---

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Let backward passes within the context accumulate on this rank only, as Accelerate does. This includes the
        backward passes of other models with the same optimizer."""
        with ExitStack() as stack:
            if self._session is None:
                stack.enter_context(super().no_sync(model))
            else:
                for optimizer in self._scheduled(model):
                    stack.enter_context(optimizer.no_sync())
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Do what Accelerate's method does, on CPUs too. ``joinables`` are prepared models and optimizers; a model stands for
        all its optimizers. Ranks that run out of batches first take over the states of the prepared schedulers and of the
        scaler. See :class:`commsched.plugins.torch.Join`.

        Raises:
            UnsupportedError: something in ``joinables`` is not prepared.
            CommschedError: see :class:`commsched.plugins.torch.Join`.
        """
        with ExitStack() as stack:
            if self._session is None or self.distributed_type not in _DATA_PARALLEL:
                stack.enter_context(super().join_uneven_inputs(joinables, even_batches))
            else:
                evens = self.even_batches if even_batches is None else even_batches
                if even_batches is not None:
                    stack.enter_context(_overridden(self._dataloaders, even_batches))
                joined = dict.fromkeys(optimizer for each in joinables for optimizer in self._joined(each))
                states = [*self._schedulers, *([] if self.scaler is None else [self.scaler])]
                stack.enter_context(Join(list(joined), enable=not evens, states=states))
            yield

    def _joined(self, joinable: Any) -> list[ScheduledOptimizer]:
        scheduled = [joinable.optimizer] if isinstance(joinable, AcceleratedOptimizer) else self._scheduled(joinable)
        if not scheduled or any(each not in _attached and each not in _averagers for each in scheduled):
            raise UnsupportedError(f"join_uneven_inputs: a {type(joinable).__name__} among the joinables is not prepared")
        return scheduled

    def scalars(self) -> dict[str, float]:
        """``Session.scalars``; nothing with one rank."""
        return {} if self._session is None or self._session.closed else self._session.scalars()

    def log(self, values: dict[str, Any], *arguments: Any, **more: Any) -> Any:
        """Log ``values`` as Accelerate does, with :meth:`scalars` beside them."""
        return super().log({**self.scalars(), **values}, *arguments, **more)

    def free_memory(self, *objects: Any) -> Any:
        """As in Accelerate. Optimizers must be prepared again before they can be used."""
        for optimizer in self._optimizers:
            if optimizer.optimizer in _attached:
                _detach(optimizer.optimizer)
        for averager, _ in self._averagers:
            _detach(averager)
        self._trained, self._averagers = [], []
        return super().free_memory(*objects)


class _ElasticPart(ElasticPart):
    """That of the ScheduledOptimizer in an optimizer that ``accelerator`` has prepared."""

    def __init__(self, optimizer: ScheduledOptimizer, accelerator: Accelerator) -> None:
        super().__init__(optimizer)
        self._accelerator = accelerator

    def begin_undo(self, keep: Keep) -> None:
        self._accelerator._require_can_be_elastic()
        super().begin_undo(keep)

    def begin_step(self, step: int) -> int:
        self._accelerator._begin_elastic_step()
        return super().begin_step(step)

    def leave(self) -> int | None:
        process_group.end()  # gloo, as the session's transport, requires that no other ranks are initialised
        return super().leave()

    def move(self, session: commsched.Session) -> None:
        self._accelerator._follow(session)
        super().move(session)


class _PartOfOneRank:
    """The part that ``commsched.Elastic`` uses in a job that is not elastic."""

    @property
    def session(self) -> commsched.Session:
        return commsched.init()

    def synchronize(self) -> None:
        """There are no outstanding updates."""


class _OptimizerOfOneRank(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's optimizer, for loops that can be elastic, too."""

    @property
    def elastic_part(self) -> _PartOfOneRank:
        return _PartOfOneRank()


class _PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Refuses to step while its gradients are not averaged."""

    models: Sequence[torch.nn.Module] = ()  # the models, unwrapped, whose gradients it averages

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given: Any = param_group["params"]
        if not isinstance(given, torch.Tensor):
            given = param_group["params"] = list(given)  # as torch does it; it may be an iterator
        added = [given] if isinstance(given, torch.Tensor) else [each[1] if type(each) is tuple else each for each in given]
        _detach_all_with(added, _averagers)
        super().add_param_group(param_group)
        owner = _owners[self]()
        if owner is not None:
            owner._schedule()

    @property
    def elastic_part(self) -> ElasticPart:
        self._require_attached()
        owner = _owners[self]()
        if owner is None:
            raise UnsupportedError("the Accelerator that has prepared this optimizer is gone: keep it as long as the job lasts")
        return _ElasticPart(self.optimizer, owner)

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._require_attached()
        super().step(closure)

    def _require_attached(self) -> None:
        if self.optimizer in _attached:
            return
        if isinstance(self.optimizer, ScheduledOptimizer):
            raise UnsupportedError(
                "this optimizer does not average gradients any more, since free_memory() was called or another one with the "
                "same parameters was prepared; prepare it again"
            )
        raise UnsupportedError(
            "this optimizer has parameters of a model that was not prepared, so its gradients would not be averaged; give "
            "prepare() the model too"
        )


@cache
def _of_one_generation(kind: Any) -> Any:
    """A subclass of ``kind``, the class of a data loader. It gives batches only in the generation that it was made for: its
    iterators too, as each of them has taken the batches of a step that was broken off."""

    def __iter__(self: Any) -> Iterator[Any]:
        accelerator, generation = self._commsched_made_for

        def require_generation() -> None:
            if accelerator._generation != generation:
                raise UnsupportedError(
                    "this data loader was prepared before ranks were lost or came: where step.is_new_world, prepare another "
                    "one for the ranks of now, from the place of step.number on"
                )

        for batch in kind.__iter__(self):
            require_generation()
            yield batch
        require_generation()  # Accelerate takes batches one ahead, and gives its last one after this

    return type(kind.__name__, (kind,), {"__iter__": __iter__})


def _detach(optimizer: ScheduledOptimizer) -> None:
    optimizer.detach()
    _attached.pop(optimizer, None)
    _averagers.pop(optimizer, None)


def _detach_all_with(parameters: Iterable[torch.Tensor], optimizers: Iterable[ScheduledOptimizer]) -> None:
    own = {id(parameter) for parameter in parameters}
    for other in list(optimizers):
        if any(id(parameter) in own for parameter in parameters_of(other)):
            _detach(other)


@contextmanager
def _overridden(loaders: Sequence[Any], even_batches: bool) -> Iterator[None]:
    """Let ``loaders`` give all ranks the same number of batches, or not, within the context."""
    samplers = [loader.batch_sampler for loader in loaders if not isinstance(loader, DataLoaderDispatcher)]
    if len(samplers) < len(loaders):
        warnings.warn(
            "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given were iterable",
            stacklevel=4,
        )
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, value in zip(samplers, before):
            sampler.even_batches = value


def _require_data_parallel(accelerator: accelerate.Accelerator) -> None:
    """Require plain data parallelism on CPUs or CUDA devices. Raises UnsupportedError if Accelerate is configured for something
    else."""
    kind = accelerator.distributed_type
    if kind not in _DATA_PARALLEL:
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
