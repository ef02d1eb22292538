"""ScheduledOptimizer: the user's optimizer, whose updates happen when someone first needs them."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch
from torch.optim import Optimizer

import commsched

from ...core.errors import ClosedError, ConfigError, TransportError, UnsupportedError
from .device import init_for
from .exchange import GradientExchange, Slot
from .guard import guard, release
from .initial_state import broadcast_model, broadcast_optimizer
from .layer_spans import trace_forward
from .narrow import require_supported, snapshot, step_some, updates_each_parameter_alone

log = logging.getLogger("commsched")


class ScheduledOptimizer(Optimizer):
    """Average the gradients of ``model`` over all ranks, front layers first, and let the next forward start layer by layer.

    ``optimizer`` is any optimizer of ``torch.optim`` (or one like it) over the parameters of ``model``; it does the updates.
    After this line the training loop stays as it was::

        optimizer = ScheduledOptimizer(optimizer, model)

    Every rank begins with rank 0's parameters, buffers and optimizer state. Backward hands each gradient over as soon as it
    exists. ``step()`` records the hyper-parameters and returns; the update of each parameter runs when someone first reads
    it, which waits for its average. Reading ``p.grad``'s values waits for the average. With one rank, or with
    ``COMMSCHED_DISABLE=1``, every call goes straight to ``optimizer``.

    Args:
        optimizer: the user's optimizer. Use only what is returned from now on.
        model: the model whose parameters it updates; its object, keys and hooks stay as they are.
        session: a session other than that of ``commsched.init()``.
        per_parameter: whether ``optimizer`` treats each parameter independently of the others, so that it may be called for
            some of them. None: yes for the optimizers of ``torch.optim``. If not, ``step()`` waits for all averages.

    Raises:
        UnsupportedError: the optimizer, the model or a parameter's type or device is not supported; says which.
        ManifestMismatch: the ranks' models or optimizers differ; names what.
        CommschedError: from ``commsched.init()``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        *,
        session: commsched.Session | None = None,
        per_parameter: bool | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would make groups and state of its own. The properties below are those of
        # the user's optimizer.
        if isinstance(optimizer, ScheduledOptimizer):
            raise ConfigError("this optimizer is a ScheduledOptimizer already")
        self.optimizer = optimizer
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._exchange: GradientExchange | None = None
        self._pending: OrderedDict[int, Slot] = OrderedDict()  # by tensor index, front layers first
        self._lock = threading.RLock()
        self._pid = os.getpid()
        session = session or init_for(optimizer)
        if session.world_size == 1:
            return
        require_supported(optimizer)
        _require_plain(model)
        self._session = session
        self._per_parameter = updates_each_parameter_alone(optimizer) if per_parameter is None else per_parameter
        if not self._per_parameter:
            log.info("%s may use all gradients at once: step() waits for all averages", type(optimizer).__name__)
        slots, self._frozen = _make_slots(optimizer, model)
        self._exchange = GradientExchange(session, slots, self.synchronize)
        beside = dict([*((slot.name, slot.parameter) for slot in slots), *self._frozen])
        broadcast_model(session, model, beside)
        broadcast_optimizer(session, optimizer)
        self._exchange.record_first_use()
        if session.observer is not None:
            trace_forward(model, session.observer, self._exchange.forward_began)
        self._forget = session.on_close(self._finish)

    # --- the training loop ---

    @Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit to the update of every parameter, with the hyper-parameters of now. Does not wait for averages.

        Raises:
            CommschedError: the session failed or was closed.
        """
        exchange = self._exchange
        if exchange is None:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._require_no_stray_gradients()
            exchange.end_round(committed=True)
            self._hyper_parameters = snapshot(self.optimizer)
            for slot in exchange.slots:
                self._await_update(slot)
            if not self._per_parameter:
                self.synchronize()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Never waits: what an outstanding update needs is kept until it is in place."""
        if self._exchange is None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shape, dtype, device = parameter.shape, parameter.dtype, parameter.device
                    parameter.grad = None if set_to_none else torch.zeros(shape, dtype=dtype, device=device)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate gradients on this rank only; the first one after it averages the sum."""
        exchange = self._exchange
        if exchange is None:
            yield
            return
        before, exchange.enabled = exchange.enabled, False
        try:
            yield
        finally:
            exchange.enabled = before

    def synchronize(self) -> None:
        """Put every outstanding update in place; waits for the averages it needs.

        Raises:
            CommschedError: the session failed or was closed.
        """
        with self._lock:
            while self._pending:
                self._put_in_place(next(iter(self._pending.values())))

    def _finish(self) -> None:
        self.synchronize()
        if self._exchange is not None:
            self._exchange.settle()

    def detach(self) -> None:
        """Put every update in place and let the model go: from now on, this is the user's optimizer, on this rank alone.

        Collective, since what is outstanding is waited for. The model may then be given to another ScheduledOptimizer.
        """
        if self._exchange is not None:
            self.synchronize()
            self._exchange.detach()
            self._forget()
            self._exchange = None

    # --- outstanding updates ---

    def _await_update(self, slot: Slot) -> None:
        slot.pending = True
        self._pending[slot.tensor] = slot

        def put_in_place() -> None:
            self._put_in_place(slot)

        guard(slot.parameter, put_in_place)
        guard(slot.view, put_in_place)

    def _put_in_place(self, needed: Slot) -> None:
        """The update of ``needed``, together with those in front of it in forward order whose averages are there too.

        Parameters stay guarded until theirs is done, so that another thread waits; this one may be within it (a hook of the
        user's optimizer reads the model) and is let through, since what is being updated is not pending any more.
        """
        exchange = self._exchange
        if os.getpid() != self._pid:
            raise ClosedError(
                "a forked process reads parameters whose update is outstanding; call optimizer.synchronize() before"
            )
        with self._lock:
            if exchange is None or not needed.pending:
                return
            exchange.wait(needed)
            batch = [needed]
            if self._per_parameter:
                for slot in self._pending.values():
                    if not exchange.is_there(slot):
                        break
                    if slot is not needed:
                        batch.append(slot)
            else:
                batch = list(self._pending.values())
                for slot in batch:
                    exchange.wait(slot)
            used = [slot for slot in batch if exchange.kept_by_any_rank(slot)]
            for slot in batch:
                slot.pending = False
                del self._pending[slot.tensor]
                release(slot.view)
            try:
                with exchange.updating():
                    self._update(used)
            finally:
                for slot in batch:
                    release(slot.parameter)

    def _update(self, slots: list[Slot]) -> None:
        began = monotonic()
        gradients = [slot.parameter.grad for slot in slots]
        try:
            for slot in slots:
                slot.parameter.grad = slot.view
            if self._per_parameter:
                step_some(self.optimizer, self._hyper_parameters, [(slot.group_index, slot.parameter) for slot in slots])
            else:
                self.optimizer.step()  # within step(): nothing has changed since, and its groups may keep counters
        except BaseException as error:
            # Half an update: no rank may go on from here as if nothing were.
            self._session.report(
                TransportError(f"rank {self._session.rank}: the optimizer raised {type(error).__name__}: {error}")
            )
            raise
        finally:
            for slot, gradient in zip(slots, gradients):
                # A gradient that is not the view was put there by zero_grad() after step(): it stays as the user left it.
                # None is also what a rank has that did not use the parameter, and then the user expects to find none.
                slot.parameter.grad = gradient
        if self._session.observer is not None:
            names = (
                slots[0].name if len(slots) == 1 else f"{len(slots)} parameters" + (f" from {slots[0].name}" if slots else "")
            )
            self._session.observer.on_span("update", names, began, monotonic())

    def _require_no_stray_gradients(self) -> None:
        for name, parameter in self._frozen:
            if parameter.grad is not None:
                raise UnsupportedError(
                    f"parameter '{name}' has a gradient, but did not require one when the optimizer was wrapped: it would not "
                    "be averaged. Wrap the optimizer after unfreezing"
                )

    # --- the rest of an optimizer's interface: never stale ---

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    @property
    def state(self) -> Any:
        self.synchronize()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.synchronize()
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """That of the user's optimizer, with every update in place."""
        self.synchronize()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the user's optimizer; every rank must load the same."""
        self.synchronize()
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """
        Raises:
            UnsupportedError: there is more than one rank; the new parameters would not be averaged.
        """
        if self._exchange is not None:
            raise UnsupportedError(
                "add_param_group after ScheduledOptimizer: the new parameters would not be averaged; wrap later"
            )
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        # Only what neither this class nor Optimizer has: what a particular optimizer adds.
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def register_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_state_dict_pre_hook(*args, **kwargs)

    def register_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_state_dict_post_hook(*args, **kwargs)

    def register_load_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_load_state_dict_pre_hook(*args, **kwargs)

    def register_load_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_load_state_dict_post_hook(*args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy is the user's optimizer: it belongs to no session."""
        self.synchronize()
        return copy.copy, (self.optimizer,)

    def __repr__(self) -> str:
        return f"Scheduled{self.optimizer!r}"


def _require_plain(model: torch.nn.Module) -> None:
    """
    Raises:
        UnsupportedError: the model already averages its gradients, is compiled, or has parameters without a shape yet.
    """
    for name, module in model.named_modules():
        where = f"module '{name}'" if name else "the model"
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            raise UnsupportedError(
                f"{where} is wrapped in {type(module).__name__}; give the model itself, which is not wrapped"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(f"{where} is a TorchScript module: its forward would read parameters before their update")
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(f"{where} is compiled: a compiled forward would read parameters before their update")
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise UnsupportedError(f"{where} makes sparse gradients; only dense ones are averaged: use sparse=False")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(f"parameter '{name}' has no shape yet; run the lazy module once before")


def _make_slots(optimizer: Optimizer, model: torch.nn.Module) -> tuple[list[Slot], list[tuple[str, torch.nn.Parameter]]]:
    """Slots of the optimizer's parameters that require a gradient, in the model's order, and the others."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    slots, frozen = [], []
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"param_groups[{index}]['params'][{position}]")
            if parameter.requires_grad:
                slots.append(Slot(name, parameter, index))
            else:
                frozen.append((name, parameter))
    slots.sort(key=lambda slot: places.get(id(slot.parameter), len(places)))
    if not slots:
        raise UnsupportedError("the optimizer has no parameter that requires a gradient")
    return slots, frozen
