"""ScheduledOptimizer: wraps the user's optimizer and runs each parameter's update when the parameter is first read."""

from __future__ import annotations

import copy
import gc
import logging
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

import commsched

from ...core.errors import ClosedError, ConfigError, TransportError, UnsupportedError, error_text
from ..common.undo import COPIED_AHEAD, Undo
from ..common.waits import require_may_wait
from . import compiled
from .checks import find_overlap, is_public, outside_of, require_optimizer_and_model, require_plain, sparse_weights
from .compared import ComparedWeights, compared_keys, mean_loss
from .device import init_for
from .elastic import ElasticPart
from .exchange import GradientExchange
from .guard import Guarded, guard, own_class, unguarded
from .initial_state import broadcast_model, broadcast_optimizer, broadcast_parameters, parameters_of, require_same_group
from .join import Join
from .layout import end_abandoned
from .marked import Twin, increment_versions, share_versions, unnoticed, warn_if_impossible
from .slot import GRADIENT_TRANSITIONS, Slot
from .timing import profiled, trace_forward
from .update import (
    SwappedIn,
    can_be_narrowed,
    is_of_torch,
    is_step_of_class,
    own_tensors,
    require_supported,
    runs_only_torch,
    snapshot,
    step_some,
    swap_in,
    swap_into_twins,
    swap_out,
    swap_out_of_twins,
    take_values_of_moved_twins,
    takes_eps_of_first,
    with_own_hooks,
)

log = logging.getLogger("commsched")

#: In so many steps in a row the compiler may find updates outstanding. After that it must be because of them that it compiles.
COMPILED_IN_STEPS = 6

_taking_part: WeakKeyDictionary[commsched.Session, WeakSet[ScheduledOptimizer]] = WeakKeyDictionary()


class ScheduledOptimizer(Optimizer):
    """Average the gradients of ``model`` over all ranks, front layers first, and let the next forward start layer by layer.

    ``optimizer`` is any optimizer of ``torch.optim`` (or one like it) over the parameters of ``model``; it does the updates.
    After this line the training loop stays as it was::

        optimizer = ScheduledOptimizer(optimizer, model)

    Every rank begins with rank 0's parameters, buffers and optimizer state. Backward submits each gradient as soon as it
    exists. ``step()`` records the hyper-parameters and returns. The update of a parameter runs when the parameter is first
    read; that read waits for the average. Reading the values of ``p.grad`` waits for the average, too. Several backward
    passes before one ``step()`` accumulate averages. Parameters may be unfrozen, or added by :meth:`add_param_group`, at any
    time, on all ranks in the same step. With one rank, or with ``COMMSCHED_DISABLE=1``, every call goes straight to
    ``optimizer``.

    Args:
        optimizer: the user's optimizer. Use only the ScheduledOptimizer from now on.
        model: the model whose parameters it updates. The model's object, keys and hooks stay as they are.
        session: the session to use instead of the one of ``commsched.init()``.
        per_parameter: whether ``optimizer`` treats each parameter independently of the others, so that it may be called for
            some of them. ``None`` means yes for the optimizers of ``torch.optim``, as long as they have no hooks and nothing
            wraps their ``step()``. If it does not, ``step()`` waits for all averages.

    Raises:
        TypeError: the arguments are not an optimizer and a model, or they are swapped.
        ConfigError: none of the optimizer's parameters belongs to ``model``. Raised with one rank, too.
        UnsupportedError: the optimizer, the model or a parameter's type or device is not supported; the message says which.
        ManifestMismatch: the ranks' models or optimizers differ; the message names the difference.
        CommschedError: ``commsched.init()`` failed.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module,
        *,
        session: commsched.Session | None = None,
        per_parameter: bool | None = None,
    ) -> None:
        # Optimizer.__init__ is not called: it would create its own groups and state. The properties below return the
        # groups and the state of the user's optimizer.
        if isinstance(optimizer, ScheduledOptimizer):
            raise ConfigError("this optimizer is a ScheduledOptimizer already")
        require_optimizer_and_model(optimizer, model)
        self.optimizer = optimizer
        self._optimizer_step_pre_hooks: OrderedDict[int, Any] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Any] = OrderedDict()
        self._exchange: GradientExchange | None = None
        self._ended: str | None = None  # the name of a parameter that another ScheduledOptimizer owns now
        self._pending: dict[int, Slot] = {}  # outstanding updates by flag, front layers first
        self._parts: list[Slot] = []  # parameters that are parts of one tensor together with others
        self._updates_running = 0  # they are nested if the user's code reads another parameter within one
        self._lock = threading.RLock()
        parameters = parameters_of(optimizer)
        outside = outside_of(model, optimizer)
        session = session or init_for(parameters)
        self._session = session
        self._model = model
        self._undo: Undo[torch.Tensor] | None = None  # by parameter; in an elastic job
        self._has_compiled = False  # code was compiled since this optimizer was made
        if session.world_size == 1 and not session.is_recorded:
            return
        require_supported(optimizer)
        require_plain(model, parameters)
        if session.rank == 0:
            if outside:
                log.warning("%s", outside)
            warn_if_impossible()
        self._per_parameter = is_of_torch(optimizer) if per_parameter is None else per_parameter
        self._hooks_per_update = per_parameter is True  # also call the user's hooks when only some parameters are updated
        self._why_step_waits: str | None = None  # why step() waits for all updates, as a clause; None: it does not wait
        self._per_parameter = self._per_parameter and can_be_narrowed(optimizer)
        if not self._per_parameter:
            self._step_must_wait(f"{type(optimizer).__name__} may use all gradients at once")
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            self._step_must_wait("TorchScript reads parameters without waiting for their update")
        exchange = self._take_part(session)
        self._compiled_in_steps = 0  # in how many steps in a row code was compiled while updates were outstanding
        self._is_compiled_anew = False  # it was so in this step
        without_gates = compiled.watch_compiler(self._before_compiling, self._graph_made)
        if without_gates is not None:
            self._step_must_wait(without_gates)
            exchange.before_compiling()
            exchange.gradients_are_read_by_compiled_code()
        if session.observer is not None:
            trace_forward(model, session.observer, exchange.forward_began)
        # Code that still holds the user's optimizer must not save stale state.
        self._state_hooks: list[Any] = []
        if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # not every optimizer class calls Optimizer.__init__
            self._state_hooks = [
                optimizer.register_state_dict_pre_hook(lambda _: self.synchronize()),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
                optimizer.register_load_state_dict_post_hook(lambda _: self._own_state()),
            ]

    def _take_part(self, session: commsched.Session) -> GradientExchange:
        """Average the gradients of the model in ``session``. Collective: all ranks begin with the values of one."""
        optimizer, model = self.optimizer, self._model
        slots = _make_slots(optimizer.param_groups, model)
        self._look_for_shared_memory(slots)
        self._look_for_repeated_parameters()
        is_first = session.place is None or session.place.generation == 1
        if session.rank == (0 if is_first else session.root):  # the others are given its state
            self._own_state()
        self._note_parameters()
        self._compared: set[str] = set()  # keys of the hyper-parameters that are compared
        if _taking_part.get(session):
            gc.collect()  # frees models that were dropped, whose parameters and buffers refer to each other
        end_abandoned(session)
        exchange = GradientExchange(session, model, slots, self.synchronize, self._supersede, self._compared)
        self._exchange = exchange
        broadcast_model(session, model, {slot.name: slot.parameter for slot in slots}, session.root)
        broadcast_optimizer(session, optimizer, None if is_first else session.root)
        self._compared |= compared_keys(optimizer, optimizer.param_groups)
        exchange.places.record_first_use()
        _taking_part.setdefault(session, WeakSet()).add(self)
        self._steps = 0
        self._make_comparison()
        return exchange

    # --- the training loop ---

    @_disable_dynamo
    @with_own_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit to the update of every parameter, with the current hyper-parameters.

        It does not wait for averages, unless the updates cannot stay outstanding (see ``per_parameter``). It waits for the
        other ranks' backward only while there are unfrozen parameters that had no gradient yet.

        Raises:
            UnsupportedError: parameters or gradients were changed so that the ranks would diverge; the message names them.
            CommschedError: the session failed or was closed.
        """
        exchange = self._exchange
        if exchange is None:
            self._require_not_ended()
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self._look_for_whole_updates()
        if closure is not None and not self._per_parameter:
            return self._step_with(closure, exchange)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            self._require_known_parameters()
            hyper_parameters = snapshot(self.optimizer)
            keeps = exchange.commit(hyper_parameters)
            self._hyper_parameters = hyper_parameters  # only after commit(), which may still run the last step's updates
            if self._undo is not None:
                self._undo.committed()
            # A learning-rate scheduler made before the optimizer was wrapped checks whether step() was called.
            self.optimizer._opt_called = True  # type: ignore[attr-defined]
            exchange.put_in_place = self._put_in_place  # so the parameters keep this object and the user's optimizer alive
            if exchange.join is None or exchange.join.live_share(exchange) == 1.0:  # else some ranks make no updates now
                self._compare_weights()
            self._look_for_unseen_readers(exchange)
            self._await_updates(exchange.places.slots, keeps)
            if self._why_step_waits is not None:
                with exchange.barrier.waiting(self._why_step_waits):
                    if (first := next(iter(self._pending.values()), None)) is not None:
                        self._copy_while_waiting(exchange, first)
                    exchange.wait_for_all()
                self.synchronize()
            exchange.barrier.step_ended()
        return loss

    def _step_with(self, closure: Callable[[], Any], exchange: GradientExchange) -> Any:
        """Let the user's optimizer call ``closure`` when and as often as it likes.

        Each call leaves averages in ``.grad`` and returns the mean of the ranks' losses, because the optimizer may base
        decisions on the loss.
        """
        self._require_no_join(f"step(closure) of {type(self.optimizer).__name__}, which averages the loss")
        if self._undo is not None:
            raise UnsupportedError(f"step(closure) of {type(self.optimizer).__name__} cannot be elastic")
        swapped: list[SwappedIn] = []
        raised: list[BaseException] = []  # errors raised by the closure, not by the optimizer

        def averaged() -> Any:
            swap_out(swapped)
            swapped.clear()
            try:
                with torch.enable_grad():
                    loss = closure()
                with self._lock:
                    self._require_known_parameters()
                    exchange.commit(snapshot(self.optimizer))
                    with exchange.barrier.waiting(f"{type(self.optimizer).__name__} calls its closure"):
                        exchange.wait_for_all()
                    swapped.extend(swap_in(exchange.kept_by_any_rank(exchange.places.slots)))
                return mean_loss(self._session, loss)
            except BaseException as error:
                raised.append(error)
                raise

        self.synchronize()
        try:
            loss = self.optimizer.step(averaged)
        except BaseException as error:
            if error not in raised:
                self._report_half_update(error)
            raise
        finally:
            swap_out(swapped)
            exchange.barrier.step_ended()
        with self._lock:
            self._compare_weights()
        return loss

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as in torch. It never waits: averages that outstanding updates need are kept until then."""
        if self._exchange is None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
            return
        self._exchange.forget_missing()
        slots = self._exchange.places.all
        if not set_to_none:
            for slot in slots:
                slot.zero(in_round=self._exchange.is_round_open)
            return
        with unguarded():  # once for all parameters: otherwise each assignment to a guarded one would call its guard
            for slot in slots:
                slot.parameter.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only, within the context. The first backward after it averages the sum.

        Without ``no_sync()``, gradients accumulate just as well, but the gradients of every backward travel. Gradients that
        are read or clipped before the first backward after the context are this rank's own sums, so clip after it. If the
        last backward before ``step()`` is within the context, ``step()`` averages the sums. If they were changed since, it
        raises UnsupportedError.
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
        """Run every outstanding update, and wait for the averages that the updates need.

        Raises:
            CommschedError: the session failed or was closed.
        """
        with self._lock:
            while (first := next(iter(self._pending.values()), None)) is not None:
                self._put_in_place(first)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        states: Sequence[Any] = (),
    ) -> Join:
        """A :class:`Join` of this optimizer, for a loop in which ranks may have different numbers of batches."""
        by_all = divide_by_initial_world_size
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=by_all, states=states)

    # --- readers that bypass PyTorch's dispatch, and therefore do not wait for outstanding updates ---

    def _step_must_wait(self, why: str) -> None:
        if self._why_step_waits is None:
            self._why_step_waits = why
            if self._session.rank == 0:
                log.info("%s: step() waits for all averages from now on", why)

    def _look_for_shared_memory(self, slots: Sequence[Slot]) -> None:
        """Make ``step()`` wait if parameters share memory: a reader of one would not wait for the update of the other. So do
        those in memory that other processes may read."""
        named = {slot.name: slot.parameter for slot in slots}
        with unguarded():
            public = next((name for name, each in named.items() if is_public(each)), None)
            overlap = find_overlap(
                {**dict(self._model.named_parameters()), **dict(self._model.named_buffers()), **named},
                {id(slot.parameter) for slot in slots},
            )
        if overlap is not None:
            self._per_parameter = False  # the user's optimizer determines the order of the updates
            self._step_must_wait(f"'{overlap[0]}' and '{overlap[1]}' lie in the same memory")
        elif public is not None:
            self._step_must_wait(f"other processes may read '{public}', which lies in shared memory")

    def _own_state(self) -> None:
        """Copy the tensors of the state. ``load_state_dict()`` of torch keeps those that it is given, which another optimizer
        may have too. Its outstanding updates are made before, since they are made at other times on other ranks."""
        if not self.optimizer.state:
            return
        for other in list(_taking_part.get(self._session, ())):
            if other is not self and other._exchange is not None:
                other.synchronize()
        own_tensors(self.optimizer)

    def _look_for_repeated_parameters(self) -> None:
        """Make ``step()`` wait if a group has a parameter twice, which torch then updates twice."""
        for index, group in enumerate(self.optimizer.param_groups):
            if len(set(map(id, group["params"]))) < len(group["params"]):
                self._per_parameter = False
                self._step_must_wait(f"a parameter is more than once in param_groups[{index}]")

    def _look_for_whole_updates(self) -> None:
        """Make ``step()`` wait if the user's optimizer has hooks or wrappers: they must run once per step, and may use all
        gradients. And if it takes something for all parameters of a group from the first of them."""
        if not self._per_parameter:
            return
        is_alone = is_step_of_class if self._hooks_per_update else runs_only_torch
        if not is_alone(self.optimizer):
            why = "has hooks, or a wrapper around its step()"
        elif takes_eps_of_first(self.optimizer):
            why = "takes eps from the type of a group's first parameter, and a group has several types (set its eps)"
        else:
            return
        self.synchronize()  # updates left outstanding by a step() before
        self._per_parameter = False
        self._step_must_wait(f"{type(self.optimizer).__name__} {why}")

    def _before_compiling(self) -> None:
        """Called before code is compiled, which may read any parameter: the compiler must find all with their own class."""
        self._has_compiled = True
        if self._exchange is None or self._session.closed:
            return
        try:
            self._is_compiled_anew = self._is_compiled_anew or bool(self._pending)
            self._exchange.before_compiling()
            self.synchronize()
        except Exception:
            pass  # the session keeps the error and readers of parameters get it; the compiled code may not use any of them

    def _graph_made(self, tensors: Sequence[torch.Tensor], why_no_gate: str | None, reads_gradients: bool) -> bool:
        """Called for each graph that is about to be compiled; see :data:`compiled.GraphMade`."""
        exchange = self._exchange
        if exchange is None or self._session.closed:
            return False
        if reads_gradients:
            exchange.gradients_are_read_by_compiled_code()
        slots = {id(slot.parameter): slot for slot in exchange.places.all}
        read = [slots[id(tensor)] for tensor in tensors if id(tensor) in slots]
        if read and why_no_gate is not None:
            self._step_must_wait(why_no_gate)
        names = {compiled.memory_of(slot.parameter): slot.name for slot in slots.values()}
        for tensor in tensors:
            memory = 0 if id(tensor) in slots else compiled.memory_of(tensor)
            if memory and memory in names:
                self._step_must_wait(f"compiled code reads the memory of '{names[memory]}' by another tensor")
        exchange.places.use_order.note(read)
        return bool(read)

    def _look_for_unseen_readers(self, exchange: GradientExchange) -> None:
        self._compiled_in_steps = self._compiled_in_steps + 1 if self._is_compiled_anew else 0
        self._is_compiled_anew = False
        if self._why_step_waits is None:
            if self._compiled_in_steps >= COMPILED_IN_STEPS:
                self._step_must_wait("code is compiled anew in each step while updates are outstanding")
            elif exchange.reader_unseen is not None:
                self._step_must_wait(exchange.reader_unseen)

    def detach(self) -> None:
        """Run every outstanding update and release the model. Afterwards every call goes straight to the user's optimizer,
        on this rank alone.

        Collective, because it waits for outstanding updates. Making another ScheduledOptimizer for a parameter of this one
        detaches this one, too. It need not be called once the model is no longer referenced.
        """
        if self._exchange is not None:
            self._require_no_join("detach(), or another ScheduledOptimizer for the same parameters")
            self.synchronize()
            self._exchange.detach()
            for handle in self._state_hooks:
                handle.remove()
            self._exchange = None

    def _supersede(self, name: str) -> None:
        self.detach()
        self._ended = name

    def _require_not_ended(self) -> None:
        if self._ended is not None:
            raise ConfigError(
                f"this ScheduledOptimizer has ended, since another one was made for its parameter '{self._ended}': call the "
                "step() of that one, or give each parameter to one optimizer only"
            )

    # --- ranks that run out of batches (called by Join too) ---

    def _joined(self) -> GradientExchange | None:
        """What averages the gradients of this optimizer; ``None`` if nothing does."""
        self._require_not_ended()
        return self._exchange

    def _take_over(self, root: int) -> None:
        """Take over the parameters, buffers and optimizer state of rank ``root``. Collective; no update may be outstanding."""
        assert self._exchange is not None
        named: dict[str, torch.Tensor] = {f"parameter '{slot.name}'": slot.parameter for slot in self._exchange.places.all}
        named |= {f"buffer '{name}'": buffer for name, buffer in self._model.named_buffers()}
        broadcast_parameters(self._session, named, root)
        broadcast_optimizer(self._session, self.optimizer, root)

    def _require_no_join(self, what: str) -> None:
        if self._exchange is not None and self._exchange.join is not None:
            raise UnsupportedError(f"{what}, within a Join would wait for ranks that have run out of batches: do it outside")

    # --- for commsched.Elastic ---

    @property
    def elastic_part(self) -> ElasticPart:
        return ElasticPart(self)

    # --- outstanding updates ---

    def _await_updates(self, slots: Sequence[Slot], keeps: Sequence[bool]) -> None:
        """Make the updates of ``slots`` outstanding: readers of the parameters, or of their gradients, wait from now on.
        ``keeps`` says by flag whether this rank has a gradient."""
        moved = False
        for slot in slots:
            if not hasattr(slot, "twin"):
                slot.twin, moved = Twin(slot.parameter, own_class(slot.parameter)), True
            if slot.twin.follow(slot.parameter):
                moved = True
        if moved:
            self._look_for_shared_memory(slots)
            shares = share_versions([slot.twin.plain for slot in slots])
            self._parts = [slot for slot, it_does in zip(slots, shares) if it_does]
        outstanding = self._why_step_waits is None  # the updates stay outstanding after this step()
        if outstanding:
            # As after a completed update, autograd must refuse to differentiate a graph from before it.
            increment_versions([slot.twin.plain for slot in slots if keeps[slot.flag]])
        self._keeps = keeps
        with unnoticed():
            for slot in slots:
                twin = slot.twin
                slot.state = GRADIENT_TRANSITIONS[slot.state, "step"]
                twin.version = twin.plain._version
                slot.record.guard(slot.parameter, slot.await_update, twin if outstanding else None)
                if not isinstance(slot.gradient, Guarded):  # most are guarded since backward
                    guard(slot.gradient, slot.await_gradient)
        self._pending.update((slot.flag, slot) for slot in slots)  # last: a signal handler makes no update of half of them

    def _put_in_place(self, needed: Slot) -> None:
        """Run the update of ``needed``, and with it the outstanding updates at the front of the forward order whose averages
        have arrived.

        Parameters and gradients stay guarded until their update is done, so that another thread waits. This thread may come
        here again during the update (a hook of the user's optimizer reads the model). It then passes, because an update that
        is running is no longer in ``_pending``.
        """
        exchange = self._exchange
        if self._session.is_forked:
            raise ClosedError(
                "a forked process reads parameters whose update is outstanding; call optimizer.synchronize() before"
            )
        require_may_wait(f"'{needed.name}', whose update is outstanding,")
        with self._lock:
            if exchange is None or needed.flag not in self._pending:
                return
            exchange.places.device.require_no_capture(needed.name)
            self._copy_while_waiting(exchange, needed)
            exchange.wait_to_update(needed)
            batch = [needed]
            if self._per_parameter:
                batch += [slot for slot in exchange.those_there(list(self._pending.values())) if slot is not needed]
            else:
                batch = list(self._pending.values())
                for slot in batch:
                    exchange.wait_to_update(slot)
            used = exchange.kept_by_any_rank(batch)
            exchange.edits.apply(batch)
            self._prepare_update(exchange, used)
            # In each of these waits a signal handler may have read parameters, and made their updates in this thread. One that
            # comes now must not end the waiting of other threads: this update counts as running before it is taken.
            self._updates_running += 1
            try:
                left = [slot for slot in batch if self._pending.pop(slot.flag, None) is not None]
            except BaseException:
                self._updates_running -= 1
                raise
            if len(left) < len(batch):
                batch, used = left, [slot for slot in used if slot in left]
            try:
                if batch:
                    with exchange.places.device.updating(), self._no_foreign_writes():
                        self._update(used)
                        for slot in batch:
                            if slot.zero_later:
                                slot.zero_if_asked()
                if self._undo is not None and self._updates_running == 1:  # else the outer update is still half made
                    self._undo.after_update()
            finally:
                self._updates_running -= 1
                for slot in batch:
                    slot.state = GRADIENT_TRANSITIONS[slot.state, "update"]  # advance() is one more call for each parameter
                    if slot.zero_later:  # another thread has asked for it during the update
                        slot.zero_if_asked()
                with unnoticed():
                    for slot in batch:
                        slot.record.release(slot.parameter)
                        gradient = slot.gradient
                        slot.record_of_gradient(gradient).release(gradient)
                if not self._pending and not self._updates_running:  # else other threads wait for it
                    exchange.put_in_place = None

    def _prepare_update(self, exchange: GradientExchange, used: Sequence[Slot]) -> None:
        """Make sure that the update of ``used`` is right and can be undone. If this raises, the updates stay outstanding."""
        for slot in used:
            twin = slot.twin
            # A handler that has updated it since has written to it, too.
            if twin.plain._version != twin.version and slot.flag in self._pending:
                raise UnsupportedError(
                    f"'{slot.name}' was written to after step(), while its update was outstanding, through an earlier "
                    "tensor that shares its memory (of state_dict() or detach(), or one of which it is a part): call "
                    "optimizer.synchronize() before writing, or state_dict() after step()"
                )
        if self._undo is not None:
            exchange.places.device.order()
            self._undo.before_update([slot.parameter for slot in used])  # out of memory, say

    @contextmanager
    def _no_foreign_writes(self) -> Iterator[None]:
        """Updates that are made within are no foreign writes to parameters that are parts of the same tensor."""
        twins = [each.twin for each in self._parts if each.flag in self._pending]
        gaps = [twin.version - twin.plain._version for twin in twins]
        yield
        for twin, gap in zip(twins, gaps):
            twin.version = twin.plain._version + gap

    def _copy_while_waiting(self, exchange: GradientExchange, needed: Slot) -> None:
        """In an elastic job, copy what outstanding updates will replace, while the average of ``needed`` is on its way."""
        if self._undo is None or exchange.is_there(needed):
            return
        exchange.places.device.order()
        slots = (
            slot
            for slot in (needed, *self._pending.values())
            if self._keeps[slot.flag] and (slot is needed or slot.shape.numel() * slot.dtype.itemsize <= COPIED_AHEAD)
        )
        self._undo.copy_while(lambda: not exchange.is_there(needed), (slot.parameter for slot in slots))

    def _make_comparison(self) -> None:
        """Start comparing the weights of all parameters that the optimizer has now."""
        assert self._exchange is not None
        places = self._exchange.places
        self._weights = ComparedWeights(self._session, places.device, tuple(places.all), places.label)

    def _compare_weights(self) -> None:
        self._weights.compare(self._steps)
        self._steps += 1

    def _update(self, slots: list[Slot]) -> None:
        began = monotonic()
        names = slots[0].name if len(slots) == 1 else f"{len(slots)} parameters" + (f" from {slots[0].name}" if slots else "")
        try:
            with profiled("update", names):
                if self._per_parameter:
                    self._update_twins(slots)
                else:
                    swapped = swap_in(slots)
                    try:
                        self.optimizer.step()  # hyper-parameters are still current within step(); groups may keep counters
                    finally:
                        swap_out(swapped)
        except BaseException as error:
            self._report_half_update(error)
            raise
        if self._session.observer is not None:
            self._session.observer.on_span("update", names, began, monotonic())

    def _update_twins(self, slots: Sequence[Slot]) -> None:
        # Torch's own code reads only the tensors that are updated here, so the guards need not be called.
        plain = runs_only_torch(self.optimizer) and all(type(slot.twin.tensor) is torch.nn.Parameter for slot in slots)
        swapped = swap_into_twins(slots, keep=plain)
        try:
            with unguarded() if plain else nullcontext():
                step_some(self.optimizer, self._hyper_parameters, slots, hooks=self._hooks_per_update, plain=plain)
        finally:
            swap_out_of_twins(swapped)
        if not is_of_torch(self.optimizer):  # those of torch do not give parameters other memory
            take_values_of_moved_twins(slots)

    def _report_half_update(self, error: BaseException) -> None:
        """Fail the session, so that no rank continues after an update that was only partly done here."""
        self._session.report(TransportError(f"rank {self._session.rank}: the optimizer raised {error_text(error)}"))

    def _note_parameters(self) -> None:
        self._parameters = [list(group["params"]) for group in self.optimizer.param_groups]

    def _require_known_parameters(self) -> None:
        groups = [group["params"] for group in self.optimizer.param_groups]
        if [len(group) for group in groups] != [len(known) for known in self._parameters] or not all(
            all(map(operator.is_, group, known)) for group, known in zip(groups, self._parameters)
        ):
            if {id(each) for group in groups for each in group} < {id(each) for known in self._parameters for each in known}:
                raise UnsupportedError(
                    "parameters were removed from param_groups, but are still averaged: freeze them (requires_grad_(False)) "
                    "and leave the groups as they are, or make another ScheduledOptimizer, on all ranks"
                )
            raise UnsupportedError(
                "the parameters in param_groups were replaced, so new ones would not be averaged; add them by "
                "add_param_group() of the ScheduledOptimizer"
            )

    # --- the rest of the optimizer interface: every value includes all updates ---

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
        """Return the ``state_dict()`` of the user's optimizer, after all outstanding updates."""
        self.synchronize()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load ``state_dict`` into the user's optimizer. Every rank must load the same one."""
        self.synchronize()
        self.optimizer.load_state_dict(state_dict)
        if self._exchange is not None and not self._state_hooks:
            self._own_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        With several ranks the call is collective and waits for outstanding updates. The new parameters begin with rank 0's
        values.

        Raises:
            ManifestMismatch: the ranks' groups differ. None has the group then, and training may go on without it.
            UnsupportedError: other ranks continued training instead.
            ConfigError: a parameter belongs to another ScheduledOptimizer.
        """
        exchange = self._exchange
        if exchange is None:
            self.optimizer.add_param_group(param_group)
            return
        self._require_no_join("add_param_group()")
        with self._lock:
            self.synchronize()
            self._require_known_parameters()
            exchange.await_all_ranks()
            first = len(self.optimizer.param_groups)
            self.optimizer.add_param_group(param_group)
            try:
                require_same_group(self._session, self.optimizer, first)
                slots = _make_slots(self.optimizer.param_groups[first:], self._model, first)
                exchange.add(slots)
            except BaseException:  # whoever goes on trains without the group, whose gradients would not be averaged
                del self.optimizer.param_groups[first:]
                raise
            self._note_parameters()
            self._look_for_shared_memory(exchange.places.all)
            self._look_for_repeated_parameters()
            self._compared |= compared_keys(self.optimizer, self.optimizer.param_groups[first:])
            broadcast_parameters(self._session, {f"parameter '{slot.name}'": slot.parameter for slot in slots})
            self._make_comparison()

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that neither this class nor Optimizer has: those that a particular optimizer adds.
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
        """A copy or a pickle contains the user's optimizer only, because a copy belongs to no session."""
        self.synchronize()
        return copy.copy, (self.optimizer,)

    def __repr__(self) -> str:
        return f"Scheduled{self.optimizer!r}"


def _make_slots(param_groups: list[dict[str, Any]], model: torch.nn.Module, first: int = 0) -> list[Slot]:
    """Make slots for all parameters, in the model's order. ``first`` is the index of the first of ``param_groups``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    sparse = sparse_weights(model)
    slots = []
    for index, group in enumerate(param_groups, first):
        seen: set[int] = set()  # a group may have a parameter twice
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = names.get(id(parameter), f"param_groups[{index}]['params'][{position}]")
            with unguarded():
                is_nested = parameter.is_nested
            if is_nested:
                raise UnsupportedError(f"parameter '{name}' is a nested tensor; only dense gradients can be averaged")
            slots.append(Slot(name, parameter, index, id(parameter) in sparse))
    return sorted(slots, key=lambda slot: places.get(id(slot.parameter), len(places)))
