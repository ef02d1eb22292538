"""Each gate of the plugin is there for a reason: without it, a test of the loops ends with wrong numbers or an error.

``GATES`` says of each how to take it away, which test then fails, and what that test says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import commsched
from commsched.core.group import DependencyProxy
from commsched.core.interfaces import Completion, Transport
from commsched.core.manifest import Manifest
from commsched.core.task import CommTask
from commsched.plugins.torch import ScheduledOptimizer, exchange, guard, marked, norms, optimizer, rounds
from commsched.plugins.torch import layout as places
from commsched.plugins.torch import timing as first_use
from commsched.plugins.torch import update as narrow
from commsched.plugins.torch.agreement import Flags
from commsched.plugins.torch.deferred import Value
from commsched.plugins.torch.edits import AwaitedGradient, Edits
from commsched.plugins.torch.exchange import GradientExchange
from commsched.plugins.torch.norms import Measures
from commsched.plugins.torch.rounds import Round
from commsched.testing.check_plugin import Delayed

from . import (
    test_accumulation,
    test_dropped,
    test_edits,
    test_late_parameters,
    test_norms,
    test_several_optimizers,
    test_unseen,
)
from .loops import (
    loop,
    test_ends,
    test_gradients,
    test_hyper_parameters,
    test_kept_objects,
    test_no_sync,
    test_optimizers,
    test_overlap,
    test_parameters,
    test_precision,
    test_resume,
    test_used,
    test_zero_grad,
)
from .loops.loop import SMALL

Take = Callable[[pytest.MonkeyPatch], None]

RELUCTANCE_SECONDS = 0.2

WRONG = r"differs from (plain training|rank 0)"
WRONG_OR_NAMED = rf"{WRONG}|since step\(\) no reader that waits"
NOT_REFUSED = "DID NOT RAISE|did not match"


def put(owner: Any, name: str, value: Any) -> Take:
    """``value`` in place of ``owner.name``."""
    return lambda patch: patch.setattr(owner, name, value)


def wrap(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Take:
    """``wrapper(owner.name)`` in place of ``owner.name``."""
    return lambda patch: patch.setattr(owner, name, wrapper(getattr(owner, name)))


def both(*takes: Take) -> Take:
    return lambda patch: [take(patch) for take in takes] and None


def nothing(*_: Any, **__: Any) -> None:
    pass


def without(
    name: str, instead: Callable[..., Any] = nothing, *, of: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a method during which ``self.name``, or ``self.of.name``, does ``instead``."""

    def wrapper(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            owner = getattr(self, of) if of else self
            before = owner.__dict__.get(name)
            setattr(owner, name, instead)
            try:
                return method(self, *args, **kwargs)
            finally:
                if before is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

        return call

    return wrapper


def as_if_unread(record: Callable[..., None]) -> Callable[..., None]:
    def call(self: Edits, edit: Any, name: str, slots: list[Any], numbers: Any) -> None:
        read = [slot for slot in slots if slot.was_read]
        for slot in read:
            slot.was_read = False
        record(self, edit, name, slots, numbers)
        for slot in read:
            slot.was_read = True

    return call


def releasing(wait: Callable[..., None]) -> Callable[..., None]:
    def call(self: GradientExchange, slot: Any) -> None:
        wait(self, slot)
        guard.release(slot.gradient)

    return call


def placeholder(self: Value) -> torch.Tensor:
    return torch.ones(self.length, dtype=torch.float64) if self.length else torch.ones((), dtype=torch.float64)


def do_not_wait(slot: Any) -> None:
    slot.proxies[0]._core._transport.wait_until_under_way(slot.name)  # or there is nothing to be overwritten yet
    guard.release(slot.gradient)


class Reluctant(Delayed):
    """An average comes when someone waits for it, or after so long that whoever did not wait has been caught."""

    def __init__(self, transport: Transport, seed: int, most_seconds: float) -> None:
        self._awaited: list[str] = []  # tensors
        self._under_way: list[str] = []  # tensors of which something was started, in any step
        self._manifests: dict[int, Manifest] = {}
        super().__init__(transport, seed, most_seconds)

    def add_group(self, group: int, manifest: Manifest) -> None:
        self._manifests[group] = manifest
        super().add_group(group, manifest)

    def start(self, task: CommTask, completion: Completion) -> None:
        super().start(task, completion)
        with self._changed:
            self._under_way += self._tensors(task)
            self._changed.notify_all()

    def _tensors(self, task: CommTask) -> list[str]:
        return [self._manifests[task.group].tensors[index].name for index in task.partition.tensors]

    def wait_until_under_way(self, tensor: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: tensor in self._under_way, 10)

    def _pause(self) -> None:
        pass

    def on_done(self, task: CommTask) -> None:
        with self._changed:
            self._replies.append((monotonic() + RELUCTANCE_SECONDS, next(self._arrivals), task))
            self._changed.notify_all()

    def _next_reply(self) -> CommTask | None:
        with self._changed:
            while not self._closed:
                now = monotonic()
                for place, (due, _, task) in enumerate(self._replies):
                    if due <= now or not set(self._awaited).isdisjoint(self._tensors(task)):
                        del self._replies[place]
                        return task
                self._changed.wait(self._replies[0][0] - now if self._replies else None)
            return None

    @contextmanager
    def awaited(self, tensor: str) -> Iterator[None]:
        with self._changed:
            self._awaited.append(tensor)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._awaited.remove(tensor)


def asking(wait: Callable[[DependencyProxy], None]) -> Callable[[DependencyProxy], None]:
    def call(self: DependencyProxy) -> None:
        transport = self._core._transport
        with transport.awaited(self.name) if isinstance(transport, Reluctant) else nullcontext():
            wait(self)

    return call


class Torch:
    """The module, but for some names."""

    def __init__(self, **others: Any) -> None:
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def no_mode(*_: Any, **__: Any) -> Any:
    return nullcontext()


# --- guards ---


def guarding_no_gradients(original: Callable[..., None]) -> Callable[..., None]:
    def call(self: guard.Record, tensor: torch.Tensor, resolve: guard.Resolve, *how: Any) -> None:
        if not isinstance(resolve, AwaitedGradient):
            original(self, tensor, resolve, *how)

    return call


def with_free_parameters(await_updates: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any, slots: Any, keeps: list[bool]) -> None:
        await_updates(self, slots, keeps)
        for slot in slots:
            guard.release(slot.parameter)

    return call


def with_free_gradients(await_updates: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any, slots: Any, keeps: list[bool]) -> None:
        await_updates(self, slots, keeps)
        for slot in slots:
            guard.release(slot.gradient)

    return call


def with_parameters_released(update: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any, slots: list[Any]) -> None:
        for slot in slots:
            guard.release(slot.parameter)
        update(self, slots)

    return call


def resolve_first_uses_only(tensor: torch.Tensor) -> None:
    """What notes the order of layers is called: a parameter that nobody seems to use is known to be read by other ways."""
    if id(tensor) in guard._guarded and "FirstUse" in getattr(guard._guarded[id(tensor)].resolve, "__qualname__", ""):
        guard._guarded[id(tensor)].resolve()


def deepcopy_at_once(self: Any, memo: Any) -> Any:
    return copy.deepcopy(marked.alias(self, guard.own_class(self)), memo)


def reduce_at_once(self: Any, protocol: Any) -> Any:
    return marked.alias(self, guard.own_class(self)).__reduce_ex__(protocol)


#: What asks no class reads as it likes.
without_marks: Take = lambda patch: patch.setattr(marked, "marked_twin", lambda _: None)  # noqa: E731


class NoLock:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


# --- what ranks tell each other ---


def keep_what_backward_left(patch: pytest.MonkeyPatch) -> None:
    """In step(), each rank says again which gradients it had after backward."""
    offer_used, offer_kept = Flags.offer_used, Flags.offer_kept

    def used(self: Any, live: bool, unfrozen: bool, adding: bool, flags: list[bool]) -> None:
        self.after_backward = flags
        offer_used(self, live, unfrozen, adding, flags)

    patch.setattr(Flags, "offer_used", used)
    patch.setattr(
        Flags,
        "offer_kept",
        lambda self, live, own, committed, unfrozen, _, *others: offer_kept(
            self, live, own, committed, unfrozen, self.after_backward, *others
        ),
    )


def with_all_kept(kept: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: replace(flags := kept(self), share=[1.0] * len(flags.share))


def with_no_average_taken_over(fold: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any) -> None:
        without = [slot for slot in self.places.slots if slot.parameter.grad is None]
        fold(self)
        for slot in without:
            slot.parameter.grad = None

    return call


class Forgetful(dict[int, Any]):
    def get(self, _: int, default: Any = None) -> Any:
        return default


# --- updates ---


def leaving_averages_in_grad(update: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any, slots: list[Any]) -> None:
        update(self, slots)
        for slot in slots:
            slot.parameter.grad = slot.gradient

    return call


def with_updates_forgotten(detach: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any) -> None:
        self._pending.clear()
        detach(self)

    return call


def zero_in_place(self: Any, set_to_none: bool = True) -> None:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()


def snapshot_without_copies(users: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in users.param_groups]


def with_state_hooks_removed(init: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for handle in self._state_hooks:
            handle.remove()

    return call


def forward_every_attribute(self: Any, name: str) -> Any:
    if name == "optimizer":
        raise AttributeError(name)
    return getattr(self.optimizer, name)


read_after_step = test_parameters.test_readers_between_step_and_the_next_forward
graph_kept = test_parameters.test_a_graph_kept_over_step_does_not_touch_what_is_outstanding

GATES: dict[str, tuple[Take, Callable[[], None], str]] = {
    # guards
    "parameters are guarded after step()": (
        wrap(ScheduledOptimizer, "_await_updates", with_free_parameters),
        partial(read_after_step, "parameters"),
        WRONG_OR_NAMED,
    ),
    "gradients are guarded once submitted": (
        wrap(guard.Record, "guard", guarding_no_gradients),
        partial(test_gradients.test_clipping_and_editing, "norm", SMALL),
        WRONG,
    ),
    "gradients from before a round are guarded": (
        put(Round, "hold", nothing),
        partial(
            test_accumulation.test_gradients_from_before_that_the_last_backward_leaves_are_clipped_as_averages,
            test_accumulation._local_then_a_part,
            SMALL,
            False,
        ),
        rf"{WRONG}|to other values here than on other ranks",
    ),
    "a gradient that is held has memory of its own": (
        put(exchange.Slot, "_keep_what_is_held", nothing),
        partial(test_gradients.test_a_gradient_that_is_held_keeps_its_values, test_gradients._added_to_the_next),
        rf"{WRONG}|to other values here than on other ranks",
    ),
    "gradients from before that are one object are parted": (
        put(exchange.Slot, "own_gradient", lambda self, gradient: gradient),
        test_accumulation.test_one_tensor_set_by_hand_as_the_gradient_of_several,
        rf"{WRONG}|memory of '\w+\.weight'\.grad was replaced",
    ),
    "gradients are guarded until the update": (
        wrap(ScheduledOptimizer, "_await_updates", with_free_gradients),
        partial(test_zero_grad.test_gradients_are_zeroed, True, False, "after clipping and step"),
        f"{WRONG}|assert False",  # the test's own assertion may be the first
    ),
    "parameters are released after their update": (
        wrap(ScheduledOptimizer, "_update", with_parameters_released),
        test_parameters.test_a_second_thread_waits_for_an_update_that_the_first_is_making,
        "assert not",
    ),
    "one thread at a time updates": (
        put(optimizer, "threading", SimpleNamespace(RLock=NoLock)),
        test_parameters.test_a_second_thread_waits_for_an_update_that_the_first_is_making,
        "assert not",
    ),
    "operations resolve what they are given": (
        both(without_marks, put(guard, "resolve", resolve_first_uses_only)),
        partial(read_after_step, "parameters"),
        WRONG_OR_NAMED,
    ),
    "operations resolve what is in lists": (
        put(guard, "tensors_in", lambda given: (value for value in given[0] if isinstance(value, guard.Guarded))),
        partial(read_after_step, "foreach norms"),
        "maximum recursion depth",  # it asks again, for ever
    ),
    "deepcopy resolves": (
        both(without_marks, put(guard.Guarded, "__deepcopy__", deepcopy_at_once)),
        partial(read_after_step, "deepcopy"),
        WRONG,
    ),
    "pickle resolves": (
        both(without_marks, put(guard.Guarded, "__reduce_ex__", reduce_at_once)),
        partial(read_after_step, "pickle"),
        WRONG,
    ),
    "readers that ask no class are seen by marks": (
        without_marks,
        partial(test_unseen.test_only_later, test_unseen.extension),
        WRONG_OR_NAMED,
    ),
    # edits
    "updates use the edited gradients": (
        put(Edits, "apply", nothing),
        partial(test_gradients.test_clipping_and_editing, "value", SMALL),
        WRONG,
    ),
    "gradients that are read are edited at once": (
        wrap(Edits, "record", as_if_unread),
        partial(test_edits.test_what_is_read_before_and_after_an_edit, "through views", "nothing"),
        WRONG,
    ),
    "the next round begins when norms were taken": (
        put(Measures, "end_round", nothing),
        test_norms.test_a_norm_outlives_its_round_and_its_session,
        rf"{WRONG}|differs",
    ),
    "a norm includes what was recorded before": (
        put(Edits, "of", lambda self, slot: []),
        partial(test_norms.test_clipping_by_a_norm, "twice"),
        WRONG,
    ),
    "gradients that were read and changed have another norm": (
        put(norms, "_ROUNDING", {torch.float64: 10.0}),
        partial(test_norms.test_what_is_done_to_gradients_before_they_are_clipped, test_norms._doubled_through_data),
        WRONG,
    ),
    "gradients stay guarded when they were read": (
        wrap(GradientExchange, "wait", releasing),
        test_norms.test_one_rank_begins_to_read_gradients_that_are_clipped,
        "to other values here than on other ranks",
    ),
    "an update waits for its coefficient": (
        put(Value, "get", placeholder),
        partial(test_norms.test_clipping_by_a_norm, "2"),
        WRONG,
    ),
    "edits are compared": (
        put(Edits, "digest", lambda self: 0.0),
        partial(test_edits.test_edits_that_differ_between_ranks_are_refused, test_edits._other_limit, False),
        NOT_REFUSED,
    ),
    "numbers of edits are compared": (
        put(Edits, "differs", lambda self, mean: False),
        partial(test_edits.test_edits_that_differ_between_ranks_are_refused, test_edits._other_number, False),
        NOT_REFUSED,
    ),
    "all ranks have the same gradients to edit": (
        put(Round, "fill", nothing),
        partial(test_used.test_gradients_are_read_where_each_rank_uses_other_experts, "clip by value", SMALL, False),
        rf"{WRONG}|was changed or dropped before",
    ),
    # waiting
    "an update waits for its average": (
        wrap(GradientExchange, "wait_to_update", without("await_arrival", do_not_wait, of="_round")),
        partial(read_after_step, "parameters"),
        WRONG,
    ),
    "an update does not wait for averages of others": (
        put(GradientExchange, "those_there", lambda self, slots: [slot for slot in slots if not self.wait_to_update(slot)]),
        test_overlap.test_the_next_forward_begins_while_the_last_layer_is_on_its_way,
        test_overlap.LATE,
    ),
    "a round begins when the last one's updates are in place": (
        wrap(GradientExchange, "_begin_round", without("_before_round")),
        partial(test_used.test_branches, "some steps", "none"),
        "OUTSTANDING.*'begin'",  # the table of the states of a gradient has no such transition
    ),
    "autograd adds to nothing outstanding": (
        wrap(GradientExchange, "_before_gradient", without("_before_round")),
        partial(graph_kept, False),
        WRONG,
    ),
    "what the user put into .grad waits for the average that it replaces": (
        wrap(GradientExchange, "_adopt", without("await_average", do_not_wait, of="_round")),
        partial(test_gradients.test_clipping_and_editing, "replaced unread", SMALL),
        rf"{WRONG}|to other values here than on other ranks",
    ),
    "state_dict() of either optimizer waits": (
        wrap(ScheduledOptimizer, "__init__", with_state_hooks_removed),
        partial(test_resume.test_the_optimizers_state_is_fresh, "state_dict of the one that was wrapped"),
        WRONG,
    ),
    "load_state_dict() waits": (
        both(
            wrap(ScheduledOptimizer, "__init__", with_state_hooks_removed),
            wrap(ScheduledOptimizer, "load_state_dict", without("synchronize")),
        ),
        test_resume.test_a_state_loaded_right_after_step_is_not_updated_by_it,
        WRONG,
    ),
    "state waits": (
        put(ScheduledOptimizer, "state", property(lambda self: self.optimizer.state)),
        partial(test_resume.test_the_optimizers_state_is_fresh, "state"),
        WRONG,
    ),
    "a pickled optimizer waits": (
        wrap(ScheduledOptimizer, "__reduce__", without("synchronize")),
        partial(test_resume.test_the_optimizers_state_is_fresh, "pickled"),
        WRONG,
    ),
    "detach() waits": (
        wrap(ScheduledOptimizer, "detach", with_updates_forgotten),
        test_optimizers.test_a_model_may_be_wrapped_again_after_detach,
        WRONG,
    ),
    "close() puts the last updates in place": (
        put(GradientExchange, "_finish", nothing),
        test_ends.test_the_last_update_is_in_place_when_the_session_closes,
        "all",
    ),
    "close() lets a last backward end": (
        both(
            put(GradientExchange, "_finish", lambda self: self.settle()),
            put(loop, "TIMEOUT_SECONDS", 1.0),
        ),
        partial(test_ends.test_a_last_backward_without_a_step_through_other_layers_on_each_rank, False),
        "not every rank ended",
    ),
    # rounds that end without an update
    "autograd adds to averages that are there": (
        wrap(GradientExchange, "_fold", without("await_average", do_not_wait, of="_round")),
        partial(test_accumulation.test_accumulation, "three", SMALL, False),
        WRONG,
    ),
    "a rank without a gradient takes the average over": (
        wrap(GradientExchange, "_fold", with_no_average_taken_over),
        partial(test_accumulation.test_accumulation, "first_on_one_rank", SMALL, False),
        WRONG,
    ),
    "what was changed was changed by all": (
        put(rounds, "require_changed_alike", nothing),
        partial(test_accumulation.test_an_edit_of_what_only_some_ranks_have_is_refused, False),
        NOT_REFUSED,
    ),
    "what was read is the same on all ranks": (
        put(rounds, "require_equal_values", nothing),
        test_several_optimizers.test_clipping_with_gradients_that_nobody_averages_is_refused,
        NOT_REFUSED,
    ),
    "the last gradient ends backward": (
        both(wrap(Round, "take", without("submit_rest")), put(loop, "TIMEOUT_SECONDS", 1.0)),
        test_gradients.test_one_rank_may_log_its_gradients_where_it_lacks_some,
        "not every rank ended",
    ),
    "a gradient kept over step() was kept by all": (
        put(GradientExchange, "_require_zeroed", nothing),
        partial(test_used.test_a_gradient_of_one_rank_that_is_kept_over_step_is_refused, "branch", False),
        NOT_REFUSED,
    ),
    "ranks wait for all before they add parameters": (
        both(put(GradientExchange, "await_all_ranks", nothing), put(loop, "TIMEOUT_SECONDS", 1.0)),
        partial(test_late_parameters.test_a_group_added_on_one_rank_only_is_refused, 0, True),
        "not every rank ended",
    ),
    "ranks add alike": (
        both(put(rounds, "require_added_alike", nothing), put(loop, "TIMEOUT_SECONDS", 1.0)),
        partial(test_late_parameters.test_a_group_added_on_one_rank_only_is_refused, 0, True),
        "not every rank ended",
    ),
    "unfrozen parameters get their place": (
        put(Round, "_exchange_late", nothing),
        partial(test_late_parameters.test_progressive_unfreezing, "plain", SMALL, False),
        rf"{WRONG}|it would not be averaged",
    ),
    "ranks unfreeze alike": (
        both(put(rounds, "require_unfrozen_alike", nothing), put(loop, "TIMEOUT_SECONDS", 1.0)),
        partial(test_late_parameters.test_unfrozen_on_one_rank_only_is_an_error, 0, False),
        "not every rank ended",  # one waits for the others to register what they have no gradient of
    ),
    # what ranks begin with, and what they tell each other
    "the model begins as rank 0's": (
        put(optimizer, "broadcast_model", nothing),
        test_resume.test_all_ranks_begin_as_rank_0,
        WRONG,
    ),
    "the optimizer begins as rank 0's": (
        put(optimizer, "broadcast_optimizer", nothing),
        partial(test_resume.test_a_job_that_goes_on_from_a_checkpoint, "before wrapping, on rank 0 only"),
        "hyper-parameters (differ|after step)",
    ),
    "layers are ordered by first use": (
        put(first_use, "guard", nothing),
        test_used.test_layers_are_ordered_by_first_use_not_by_registration,
        "assert",
    ),
    "a rank without a gradient counts as zeros": (
        put(exchange.Slot, "put_zeros", nothing),
        partial(test_used.test_branches, "ranks in turn", "none"),
        WRONG,
    ),
    "a parameter that nobody used is not updated": (
        wrap(Flags, "kept", with_all_kept),
        partial(test_used.test_branches, "never", "none"),
        WRONG,
    ),
    "a gradient dropped before step() is not used": (
        keep_what_backward_left,
        partial(test_gradients.test_a_gradient_dropped_between_backward_and_step, False),
        WRONG,
    ),
    "a rank without a gradient that others have finds the average": (
        put(Round, "fill", nothing),
        partial(test_used.test_gradients_are_read_where_each_rank_uses_other_experts, "clip by norm", SMALL, False),
        "was changed or dropped before step|NoneType",
    ),
    "who reads a gradient that is not there asks for those of others": (
        put(Round, "backward_ended", nothing),
        partial(test_used.test_gradients_are_read_where_each_rank_uses_other_experts, "clip by norm", SMALL, False),
        "was changed (or dropped )?before step",
    ),
    "no gradient is read within backward": (
        put(exchange, "current_task", lambda: -1),
        test_gradients.test_reading_a_gradient_within_backward_is_refused,
        NOT_REFUSED,
    ),
    "all ranks step, or none": (
        put(rounds, "require_same_end", nothing),
        partial(test_accumulation.test_ranks_with_different_numbers_of_backward_passes_are_told, 0, False),
        f"{NOT_REFUSED}|rank 0 has .* but rank 1 does not",  # hyper-parameters, which only a rank that steps has
    ),
    "a parameter has one owner": (
        put(places, "_owners", Forgetful()),
        test_dropped.test_the_first_optimizer_does_not_step_any_more,
        NOT_REFUSED,
    ),
    "what was not averaged was not changed": (
        put(rounds, "require_averaged_before_changed", nothing),
        test_no_sync.test_a_rank_that_changed_nothing_is_told_too,
        NOT_REFUSED,
    ),
    "a dropped round ends with the next backward": (
        put(Round, "is_dropped", lambda self: False),
        partial(test_zero_grad.test_a_step_that_all_ranks_drop_before_they_use_different_parts, False, False),
        "ranks would diverge",
    ),
    "memory of gradients is not replaced": (
        put(exchange.Slot, "require_in_buffer", nothing),
        test_kept_objects.test_gradients_that_are_shared_and_used_are_refused_by_name,
        NOT_REFUSED,
    ),
    # updates
    "what the user put into .grad is what the update uses": (
        put(GradientExchange, "_adopt", nothing),
        partial(test_gradients.test_clipping_and_editing, "replaced", SMALL),
        WRONG,
    ),
    "hyper-parameters are the same on all ranks": (
        put(rounds, "require_equal_hyper_parameters", nothing),
        partial(test_hyper_parameters.test_a_hyper_parameter_of_one_rank_ends_the_job_before_the_update, "rate"),
        NOT_REFUSED,
    ),
    "hyper-parameters are those of step()": (
        put(optimizer, "snapshot", lambda users: users.param_groups),
        partial(test_hyper_parameters.test_hyper_parameters_changed_by_hand, "lr", "after step"),
        WRONG,
    ),
    "hyper-parameters that are tensors are copied": (
        put(optimizer, "snapshot", snapshot_without_copies),
        test_hyper_parameters.test_a_learning_rate_that_is_a_tensor_changed_in_place,
        WRONG,
    ),
    "zero_grad() leaves the outstanding gradient alone": (
        put(ScheduledOptimizer, "zero_grad", zero_in_place),
        partial(test_zero_grad.test_gradients_are_zeroed, False, False, "after step"),
        rf"assert False|{WRONG}",  # in flight they are not zeros
    ),
    "an update leaves .grad as it was": (
        wrap(ScheduledOptimizer, "_update", leaving_averages_in_grad),
        partial(test_used.test_branches, "some steps", "none"),
        WRONG,
    ),
    "an update leaves autocast": (
        put(narrow, "torch", Torch(autocast=no_mode)),
        test_parameters.test_updates_within_autocast_are_not_made_in_16_bits,
        WRONG,
    ),
    "an update leaves inference mode": (
        put(narrow, "torch", Torch(inference_mode=no_mode)),
        partial(test_parameters.test_evaluation, "inference_mode", "after step"),
        "[Ii]nference",
    ),
    "an optimizer that uses all gradients at once is called once": (
        both(put(optimizer, "is_of_torch", lambda _: True), put(optimizer, "runs_only_torch", lambda _: True)),
        test_optimizers.test_an_optimizer_from_elsewhere_is_called_once_per_step_with_all_averages,
        r"has changed .* in param_groups",
    ),
    "gradients are unscaled before the update": (
        put(ScheduledOptimizer, "__getattr__", forward_every_attribute),
        partial(test_precision.test_gradients_are_scaled_and_overflow_steps_skipped_by_all, "fused Adam", "nowhere", False),
        WRONG,
    ),
    "a closure may run backward": (
        put(optimizer, "torch", Torch(enable_grad=no_mode)),
        test_parameters.test_step_with_a_closure,
        "is_grad_enabled",
    ),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of threads that meet without the lock
@pytest.mark.parametrize("name", GATES)
def test_without_the_gate_a_loop_goes_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away, check, says = GATES[name]
    monkeypatch.setattr(loop, "TIMEOUT_SECONDS", 10.0)  # where a hang is what the gate prevents, it says so
    monkeypatch.setattr(loop, "CHECK_WEIGHTS", 0)  # or it might be the first to say what went wrong
    monkeypatch.setattr(test_overlap, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(loop, "Delayed", Reluctant)
    monkeypatch.setattr(DependencyProxy, "wait", asking(DependencyProxy.wait))
    take_away(monkeypatch)
    with pytest.raises(
        (AssertionError, commsched.CommschedError, KeyError, RuntimeError, TimeoutError, pytest.fail.Exception), match=says
    ):
        check()
