"""Lightning plugin.

    import commsched.plugins.lightning
    trainer = lightning.pytorch.Trainer(strategy="commsched", devices=4, ...)

Everything else of the training script stays as it is. The settings are the same as for ``commsched.init``. Set them in the
environment, or pass them to the strategy: ``Trainer(strategy=ScheduledStrategy(transport="gloo"), ...)``.

``pytorch_lightning`` is the code of ``lightning.pytorch`` in a package of its own, with other classes. So the strategy uses the
package that the script has imported before, or else the installed one, and is registered with that.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

try:
    import torch
    import torch.distributed as dist
    from torch.optim import Optimizer
except ModuleNotFoundError as error:  # Lightning brings PyTorch
    raise ModuleNotFoundError('this plugin needs Lightning: pip install "commsched[lightning]"', name="lightning") from error

import commsched

from ..core import timeouts
from ..core.errors import CommschedError, UnsupportedError, error_text
from ..core.world import World
from ..settings import Settings, SettingsKeywords
from .torch import ScheduledOptimizer

_is_first_choice = "lightning.pytorch" in sys.modules or (
    "pytorch_lightning" not in sys.modules and find_spec("lightning") is not None
)
try:
    if TYPE_CHECKING or _is_first_choice:
        from lightning.pytorch.core.optimizer import LightningOptimizer
        from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    else:
        from pytorch_lightning.core.optimizer import LightningOptimizer
        from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('this plugin needs Lightning: pip install "commsched[lightning]"', name="lightning") from error

__all__ = ["ScheduledStrategy"]

#: The maximum size of one broadcast of buffers, as in DistributedDataParallel.
_BROADCAST_BYTES = 250 * 2**20


class ScheduledStrategy(DDPStrategy):
    """Every rank trains a replica of the model; commsched averages the gradients. Registered as "commsched".

    It is Lightning's DDP strategy, but ScheduledOptimizer wraps the optimizers and DDP does not wrap the model.

    Processes, samplers, metrics, barriers and checkpoints are the same as with Lightning's "ddp", over the same process group.
    The session lasts from the setup of ``fit`` to its end. Do not call ``commsched.init()`` yourself. With one rank, neither
    model nor optimizers are wrapped. With ``disable=1``, this is the "ddp" strategy.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout:
            as for ``DDPStrategy``.
        broadcast_buffers: whether rank 0's buffers (batch statistics) are sent to all ranks before training steps and
            validation, as with DDP. If not, every rank begins with rank 0's buffers and then keeps its own.
        per_parameter: see ``ScheduledOptimizer``.
        settings: the settings of ``commsched.init``.

    Raises:
        ConfigError: a setting is unknown or wrong; the message names it.
        UnsupportedError: the job is elastic.
    """

    strategy_name = "commsched"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        *,
        broadcast_buffers: bool = True,
        per_parameter: bool | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> None:
        if commsched.is_elastic():
            raise UnsupportedError(
                "Lightning's Trainer cannot be elastic, since it has a loop and a process group of its own: start it without "
                "--elastic and resume with fit(..., ckpt_path=...), or write the loop in PyTorch with commsched.Elastic"
            )
        Settings.load(settings, {})  # wrong settings are refused here, before Lightning starts any process
        ddp: dict[str, Any] = {} if broadcast_buffers else {"broadcast_buffers": False}  # DDP is used with disable=1
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **ddp,
        )
        self._settings = settings
        self._per_parameter = per_parameter
        self._broadcast_buffers = broadcast_buffers
        self._training_steps = 0
        self._accumulates = False  # within block_backward_sync()
        self._buffers_due = True
        self._session: commsched.Session | None = None  # set during fit, if there are other ranks

    # --- fit begins and ends ---

    def setup_environment(self) -> None:
        """Set up the environment as "ddp" does, if the number of ranks is right.

        Raises:
            ConfigError: the launcher of this process has another number of ranks than Lightning.
        """
        commsched.require_world_size(self.num_nodes * self.num_processes, "Lightning's Trainer(devices=..., num_nodes=...)")
        super().setup_environment()

    def configure_ddp(self) -> None:
        """Open the session, instead of wrapping the model in DDP. Collective."""
        if self.world_size == 1:
            return
        session = self._open_session()
        if session.world_size == 1:  # disable=1
            commsched.shutdown()
            super().configure_ddp()
        else:
            self._session = session

    def _open_session(self) -> commsched.Session:
        world = World(self.global_rank, self.world_size, self.local_rank, self.num_processes, "Lightning")
        settings = self._settings.copy()
        if world.one_machine:
            # The launcher's default rendezvous needs a common parent process, which Lightning's own ranks do not have.
            directory = Path(tempfile.gettempdir()) / f"commsched-{os.getuid()}"
            settings.setdefault("rendezvous", self.broadcast(str(directory / f"lightning-{secrets.token_hex(8)}.json")))
        return commsched.init(device=str(self.root_device), world=world, **settings)

    def setup_optimizers(self, trainer: Any) -> None:
        """Call the model's ``configure_optimizers``, and wrap each optimizer in a ScheduledOptimizer. Collective.

        Raises:
            UnsupportedError: there is no optimizer, or ScheduledOptimizer refuses one.
        """
        super().setup_optimizers(trainer)
        if self._session is not None:
            self.optimizers = [self._schedule(optimizer) for optimizer in self.optimizers]

    def _schedule(self, optimizer: Optimizer) -> ScheduledOptimizer:
        assert self.lightning_module is not None
        if type(optimizer).__name__ == "_MockOptimizer":  # made by Lightning if configure_optimizers returns none
            raise UnsupportedError(
                "configure_optimizers returned no optimizer: only gradients of parameters of the optimizers that it returns "
                "are averaged. Return them from there, also for manual optimization"
            )
        return ScheduledOptimizer(optimizer, self.lightning_module, session=self._session, per_parameter=self._per_parameter)

    @property
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        DDPStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        for wrapper in self._lightning_optimizers:
            if isinstance(wrapper.optimizer, ScheduledOptimizer):
                kind: Any = type(wrapper)
                wrapper.__class__ = _forwarding(kind)

    def on_exception(self, exception: BaseException) -> None:
        """Report the exception to every rank, so that no rank waits for this one."""
        super().on_exception(exception)
        if self._session is not None:
            self._session.abort(error_text(exception))

    def teardown(self) -> None:
        """Run the outstanding updates and close the session. Collective, unless the training has failed."""
        session = self._session
        if session is not None and not session.closed:
            for optimizer in self._scheduled():
                optimizer.detach()
            commsched.shutdown()
            session = None
        self._session = None
        with suppress(CommschedError) if session is not None else nullcontext():  # updates raise after a failure
            super().teardown()

    # --- training ---

    def _scheduled(self) -> list[ScheduledOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, ScheduledOptimizer)]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backward passes within the context accumulate gradients on this rank only."""
        with ExitStack() as stack:
            stack.enter_context(super().block_backward_sync())
            for optimizer in self._scheduled():
                stack.enter_context(optimizer.no_sync())
            before, self._accumulates = self._accumulates, True
            try:
                yield
            finally:
                self._accumulates = before

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._share_buffers()
        self._buffers_due = not self._accumulates
        self._log_scalars()
        return super().training_step(*args, **kwargs)

    def _log_scalars(self) -> None:
        """Give ``Session.scalars`` to the trainer's loggers, as often as metrics. They do not become metrics, which callbacks
        see and checkpoints save."""
        trainer: Any = None if self.lightning_module is None else self.lightning_module.trainer
        if self._session is None or trainer is None or not trainer.loggers:
            return
        self._training_steps += 1
        if trainer.log_every_n_steps and self._training_steps % trainer.log_every_n_steps == 0:
            scalars = self._session.scalars()
            for logger in trainer.loggers if scalars else ():
                logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_start(self) -> None:
        self._buffers_due = True
        super().on_validation_start()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step; before the first batch, send rank 0's buffers to all ranks.

        They are sent before the first batch only, because ranks may validate different numbers of batches. They are not sent
        earlier, because callbacks may first have to load the weights to validate.
        """
        self._share_buffers()
        self._buffers_due = False
        return super().validation_step(*args, **kwargs)

    def _share_buffers(self) -> None:
        """Send rank 0's buffers to all ranks, when DDP would do so: not if they are unchanged since the last time, or if only
        accumulating steps of this rank have changed them since."""
        if self._session is None or not self._broadcast_buffers or not self._buffers_due:
            return
        assert self.lightning_module is not None
        buffers = [buffer.detach() for buffer in self.lightning_module.buffers()]
        if buffers:
            assert dist.group.WORLD is not None
            try:
                dist._broadcast_coalesced(dist.group.WORLD, buffers, _BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
            except RuntimeError as error:
                raise self._cause(error) from error

    def _cause(self, error: RuntimeError) -> Exception:
        """Return the error that says why another rank is lost, if the job reports one, else ``error``. It waits a moment,
        because the lost rank's connections break before the cause is reported."""
        assert self._session is not None
        return self._session.await_failure(timeouts.RAISE_SECONDS) or error


@cache
def _forwarding(kind: Any) -> Any:
    """A subclass of ``kind``, the class of a ``LightningOptimizer``. It forwards every attribute that the wrapper does not
    define itself to the ScheduledOptimizer that it wraps.

    A ``LightningOptimizer`` changes its class to a subclass of the wrapped object's class, but does not have the state of such
    an object, and its attribute ``optimizer`` has another meaning than in ScheduledOptimizer. Without the forwarding, methods
    of ScheduledOptimizer would run with the wrapper as ``self``.
    """

    def __getattribute__(self: Any, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        if name in attributes or name in vars(LightningOptimizer) or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(attributes["_optimizer"], name)

    return type(kind.__name__, (kind,), {"__getattribute__": __getattribute__})


StrategyRegistry.register("commsched", ScheduledStrategy, "DDP without its wrapper: commsched averages the gradients")
