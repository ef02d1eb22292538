"""ScheduledOptimizer: the user's optimizer, whose updates happen when someone first needs them."""

from __future__ import annotations

import copy
import logging
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

import commsched

from ...core.errors import ClosedError, ConfigError, TransportError, UnsupportedError
from . import compiled
from .device import init_for
from .exchange import GradientExchange
from .guard import guard, own_class, release, unguarded
from .initial_state import broadcast_model, broadcast_optimizer, broadcast_parameters, require_same_group
from .layer_spans import trace_forward
from .lent import Lent, lend, take_back
from .mean_loss import mean_loss
from .narrow import require_supported, snapshot, step_some, updates_each_parameter_alone
from .own_hooks import runs_only_torch, with_own_hooks, without_hooks
from .plain import require_plain
from .shared_memory import find_overlap
from .slot import Slot
from .sparse import sparse_weights

log = logging.getLogger("commsched")


class ScheduledOptimizer(Optimizer):
    """Average the gradients of ``model`` over all ranks, front layers first, and let the next forward start layer by layer.

    ``optimizer`` is any optimizer of ``torch.optim`` (or one like it) over the parameters of ``model``; it does the updates.
    After this line the training loop stays as it was::

        optimizer = ScheduledOptimizer(optimizer, model)

    Every rank begins with rank 0's parameters, buffers and optimizer state. Backward hands each gradient over as soon as it
    exists. ``step()`` records the hyper-parameters and returns; the update of each parameter runs when someone first reads
    it, which waits for its average. Reading ``p.grad``'s values waits for the average. Several backward passes before one
    ``step()`` accumulate averages; parameters may be unfrozen, or added by :meth:`add_param_group`, at any time, on all ranks
    in the same step. With one rank, or with
    ``COMMSCHED_DISABLE=1``, every call goes straight to ``optimizer``.

    Args:
        optimizer: the user's optimizer. Use only what is returned from now on.
        model: the model whose parameters it updates; its object, keys and hooks stay as they are.
        session: a session other than that of ``commsched.init()``.
        per_parameter: whether ``optimizer`` treats each parameter independently of the others, so that it may be called for
            some of them. None: yes for the optimizers of ``torch.optim``, as long as they have no hooks and nothing around
            their ``step()``. If not, ``step()`` waits for all averages.

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
        self._pending: OrderedDict[int, Slot] = OrderedDict()  # by flag, front layers first
        self._lock = threading.RLock()
        self._pid = os.getpid()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        session = session or init_for(parameters)
        if session.world_size == 1:
            return
        require_supported(optimizer)
        require_plain(model, parameters)
        self._session = session
        self._per_parameter = updates_each_parameter_alone(optimizer) if per_parameter is None else per_parameter
        self._hooks_per_update = per_parameter is True  # hooks of the user's optimizer are called for some parameters, too
        self._why_step_waits: str | None = None  # for all updates, as a clause; None: it leaves them outstanding
        if not self._per_parameter:
            self._step_must_wait(f"{type(optimizer).__name__} may use all gradients at once")
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            self._step_must_wait("TorchScript reads parameters without waiting for their update")
        self._model = model
        slots = _make_slots(optimizer.param_groups, model)
        self._look_for_shared_memory(slots)
        self._note_parameters()
        self._exchange = GradientExchange(session, model, slots, self.synchronize)
        broadcast_model(session, model, {slot.name: slot.parameter for slot in slots})
        broadcast_optimizer(session, optimizer)
        self._exchange.places.record_first_use()
        compiled.watch(self._before_compiling)
        if compiled.was_seen():
            self._before_compiling()
        if session.observer is not None:
            trace_forward(model, session.observer, self._exchange.forward_began)
        self._forget = session.on_close(self._finish)
        # Whoever still holds the user's optimizer saves no stale state.
        self._state_hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self.synchronize()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
        ]

    # --- the training loop ---

    @_disable_dynamo
    @with_own_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit to the update of every parameter, with the hyper-parameters of now. Does not wait for averages; for the
        other ranks' backward only while there are unfrozen parameters that had no gradient yet.

        Raises:
            UnsupportedError: parameters or gradients were changed in a way that would part the ranks; names them.
            CommschedError: the session failed or was closed.
        """
        exchange = self._exchange
        if exchange is None:
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self._look_for_hooks()
        if closure is not None and not self._per_parameter:
            return self._step_with(closure, exchange)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._require_known_parameters()
            exchange.commit()
            self._hyper_parameters = snapshot(self.optimizer)
            # A learning-rate scheduler made before this class was wrapped around asks whether step() was called.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            for slot in exchange.places.slots:
                self._await_update(slot)
            self._look_for_unseen_readers(exchange)
            if self._why_step_waits is not None:
                with exchange.barrier.waiting(self._why_step_waits):
                    exchange.wait_for_all()
                self.synchronize()
            exchange.barrier.step_ended()
        return loss

    def _step_with(self, closure: Callable[[], Any], exchange: GradientExchange) -> Any:
        """The user's optimizer calls ``closure`` when and as often as it likes. Each call ends with averages in ``.grad``, and
        gives the mean of the ranks' losses, on which it may decide."""
        lent: list[Lent] = []
        raised: list[BaseException] = []  # by the closure, and not by the optimizer

        def averaged() -> Any:
            take_back(lent, deferred=False)
            lent.clear()
            try:
                with torch.enable_grad():
                    loss = closure()
                with self._lock:
                    self._require_known_parameters()
                    exchange.commit()
                    with exchange.barrier.waiting(f"{type(self.optimizer).__name__} calls its closure"):
                        exchange.wait_for_all()
                    lent.extend(lend(exchange.kept_by_any_rank(exchange.places.slots)))
                return mean_loss(self._session, loss)
            except BaseException as error:
                raised.append(error)
                raise

        self.synchronize()
        try:
            return self.optimizer.step(averaged)
        except BaseException as error:
            if error not in raised:
                self._report_half_update(error)
            raise
        finally:
            take_back(lent, deferred=False)
            exchange.barrier.step_ended()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Never waits: what an outstanding update needs is kept until it is in place."""
        if self._exchange is None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
            return
        for slot in self._exchange.places.all:
            if set_to_none:
                slot.parameter.grad = None
            else:
                slot.zero()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within accumulate gradients on this rank only; the first one after it averages the sum.

        Without it, gradients accumulate just as well, but those of every backward travel. What is read, and clipped, before
        that first one are this rank's own sums: clip after it. ``step()`` averages what the last backward has left within, but
        not if it was changed since: then it ends in an UnsupportedError.
        """
        exchange = self._exchange
        if exchange is None:
            yield
            return
        before, exchange.enabled = exchange.enabled, False
        try:
            yield
        finally:
            exchange.enabled = before

    @_disable_dynamo
    def synchronize(self) -> None:
        """Put every outstanding update in place; waits for the averages it needs.

        Raises:
            CommschedError: the session failed or was closed.
        """
        with self._lock:
            while self._pending:
                self._put_in_place(next(iter(self._pending.values())))

    # --- readers that PyTorch does not dispatch, and that therefore do not ask for outstanding updates ---

    def _step_must_wait(self, why: str) -> None:
        if self._why_step_waits is None:
            self._why_step_waits = why
            if self._session.rank == 0:
                log.info("%s: step() waits for all averages from now on", why)

    def _look_for_shared_memory(self, slots: Sequence[Slot]) -> None:
        """The reader of one parameter does not ask for the update of another that lies in the same memory."""
        named = {slot.name: slot.parameter for slot in slots}
        with unguarded():
            overlap = find_overlap(
                {**dict(self._model.named_parameters()), **dict(self._model.named_buffers()), **named},
                {id(slot.parameter) for slot in slots},
            )
        if overlap is not None:
            self._per_parameter = False  # and the user's optimizer knows the order in which they are updated
            self._step_must_wait(f"'{overlap[0]}' and '{overlap[1]}' lie in the same memory")

    def _look_for_hooks(self) -> None:
        """Hooks and wrappers of the user's optimizer are to run once per step, and may use all gradients."""
        if self._per_parameter and not self._hooks_per_update and not runs_only_torch(self.optimizer):
            self.synchronize()  # what was left outstanding while there was nothing of that kind
            self._per_parameter = False
            self._step_must_wait(f"{type(self.optimizer).__name__} has hooks, or something around its step()")

    def _before_compiling(self) -> None:
        if self._exchange is None or self._session.closed:
            return
        self._step_must_wait("compiled code reads parameters all at once")
        self._exchange.before_compiling()
        try:
            self.synchronize()
        except Exception:
            pass  # the session keeps it, and whoever reads a parameter is told: what compiles may have nothing to do with them

    def _look_for_unseen_readers(self, exchange: GradientExchange) -> None:
        compiled.keep_watching()
        if self._why_step_waits is None:
            if compiled.was_seen():
                self._before_compiling()
            elif exchange.reader_unseen is not None:
                self._step_must_wait(exchange.reader_unseen)

    def _finish(self) -> None:
        self.synchronize()
        if self._exchange is not None:
            self._exchange.finish()

    def detach(self) -> None:
        """Put every update in place and let the model go: from now on, this is the user's optimizer, on this rank alone.

        Collective, since what is outstanding is waited for. The model may then be given to another ScheduledOptimizer.
        """
        if self._exchange is not None:
            self.synchronize()
            self._exchange.detach()
            self._forget()
            for handle in self._state_hooks:
                handle.remove()
            self._exchange = None

    # --- outstanding updates ---

    def _await_update(self, slot: Slot) -> None:
        slot.pending = True
        self._pending[slot.flag] = slot
        put_in_place = partial(self._put_in_place, slot)
        guard(slot.parameter, put_in_place)
        guard(slot.gradient, put_in_place)

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
                exchange.wait(slot)  # which lets readers of the gradient pass
            used = exchange.kept_by_any_rank(batch)
            for slot in batch:
                slot.pending = False
                del self._pending[slot.flag]
            try:
                with exchange.updating():
                    self._update(used)
            finally:
                for slot in batch:
                    release(slot.parameter)

    def _update(self, slots: list[Slot]) -> None:
        began = monotonic()
        lent: list[Lent] = []
        try:
            lent = lend(slots)
            if self._per_parameter:
                with nullcontext() if self._hooks_per_update else without_hooks(self.optimizer):
                    self._step_some(slots)
            else:
                self.optimizer.step()  # within step(): nothing has changed since, and its groups may keep counters
        except BaseException as error:
            self._report_half_update(error)
            raise
        finally:
            take_back(lent, deferred=self._per_parameter)
        if self._session.observer is not None:
            names = (
                slots[0].name if len(slots) == 1 else f"{len(slots)} parameters" + (f" from {slots[0].name}" if slots else "")
            )
            self._session.observer.on_span("update", names, began, monotonic())

    def _step_some(self, slots: Sequence[Slot]) -> None:
        # Torch's own code reads nothing but what is being updated here, so that no guard need be asked each time.
        plain = runs_only_torch(self.optimizer) and all(own_class(slot.parameter) is torch.nn.Parameter for slot in slots)
        with unguarded() if plain else nullcontext():
            step_some(self.optimizer, self._hyper_parameters, [(slot.param_group, slot.parameter) for slot in slots])

    def _report_half_update(self, error: BaseException) -> None:
        """No rank may go on from there as if nothing were."""
        self._session.report(TransportError(f"rank {self._session.rank}: the optimizer raised {type(error).__name__}: {error}"))

    def _note_parameters(self) -> None:
        self._parameters = [list(group["params"]) for group in self.optimizer.param_groups]

    def _require_known_parameters(self) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        if [len(group) for group in groups] != [len(known) for known in self._parameters] or not all(
            all(map(operator.is_, group, known)) for group, known in zip(groups, self._parameters)
        ):
            raise UnsupportedError(
                "the parameters in param_groups are not those of before, so new ones would not be averaged; add them by "
                "add_param_group() of the ScheduledOptimizer"
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
        """As in torch. With several ranks it is collective and waits for what is outstanding; the new parameters begin with
        rank 0's values.

        Raises:
            ManifestMismatch: the ranks' groups differ.
            UnsupportedError: other ranks trained on instead.
            ConfigError: a parameter belongs to another ScheduledOptimizer.
        """
        exchange = self._exchange
        if exchange is None:
            self.optimizer.add_param_group(param_group)
            return
        with self._lock:
            self.synchronize()
            self._require_known_parameters()
            exchange.meet()
            self.optimizer.add_param_group(param_group)
            self._note_parameters()
            first = len(self.optimizer.param_groups) - 1
            require_same_group(self._session, self.optimizer, first)
            slots = _make_slots(self.optimizer.param_groups[first:], self._model, first)
            self._look_for_shared_memory([*exchange.places.all, *slots])
            exchange.add(slots)
            broadcast_parameters(self._session, {slot.name: slot.parameter for slot in slots})

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


def _make_slots(param_groups: list[dict[str, Any]], model: torch.nn.Module, first: int = 0) -> list[Slot]:
    """Slots of all parameters, in the model's order. ``first``: the index of the first of ``param_groups``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    sparse = sparse_weights(model)
    slots = []
    for index, group in enumerate(param_groups, first):
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"param_groups[{index}]['params'][{position}]")
            slots.append(Slot(name, parameter, index, id(parameter) in sparse))
    return sorted(slots, key=lambda slot: places.get(id(slot.parameter), len(places)))
