"""Models and optimizers that nobody has any more: nothing keeps them, and others for the same parameters may follow."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched.plugins.torch.deferred import Deferred

from .loops.loop import Data, mlp, require_plain, run, sgd, train


@pytest.fixture(autouse=True, scope="module")
def _collections_are_quick() -> None:
    """Each would look through all that other files' tests have imported, which takes half a second."""
    gc.collect()
    gc.freeze()


ORDERED = pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


class _Ends:
    """Tells of objects whether they are gone, which a thread that has just done with one may put off for a moment."""

    def __init__(self) -> None:
        self._ends: list[tuple[str, threading.Event]] = []

    def watch(self, *objects: Any) -> None:
        for each in objects:
            self._ends.append((type(each).__name__, threading.Event()))
            weakref.finalize(each, self._ends[-1][1].set)

    def alive(self) -> list[str]:
        return [name for name, end in self._ends if not end.wait(60)]


def _buffers(optimizer: Any) -> list[Any]:
    """The memory of gradients and flags."""
    places = optimizer._exchange.places
    groups = [*places.groups, *(group for group, _ in places.flags.registered)]
    return [buffer.obj for group in groups for buffer in group.buffers.values()]


@pytest.mark.parametrize("end", ["after step()", "after a forward", "after zero_grad()", "after backward", "before training"])
@ORDERED
def test_a_model_that_is_dropped_is_freed_with_its_optimizers_and_buffers(ordered: bool, end: str) -> None:
    """As in cross-validation. ``end`` is where each fold is left."""
    together = threading.Barrier(2, timeout=60)

    def fold(data: Data, ends: _Ends) -> None:
        model = mlp()
        optimizer = data.scheduled(sgd(model), model)
        ends.watch(model, model[0].weight, optimizer, optimizer.optimizer, optimizer._exchange)
        if end == "before training":
            return
        train(data, model, optimizer, 2)
        if end == "after a forward":
            data.loss(model)
        elif end != "after step()":
            optimizer.zero_grad()
        if end == "after backward":
            data.loss(model, 2).backward()  # what this has begun is ended by whoever comes next
        else:
            ends.watch(*_buffers(optimizer))

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for _ in range(3):
            ends = _Ends()
            fold(data, ends)
            together.wait()
            if data.ranks == [0]:
                gc.collect()  # of all threads, and not in two at once
            together.wait()
            assert not ends.alive()

    run(loop, ordered=ordered)


def test_the_next_optimizer_has_dropped_models_freed() -> None:
    """Python itself would wait until there are many new objects, however large they are."""
    together = threading.Barrier(2, timeout=60)

    def fold(data: Data, ends: _Ends) -> None:
        model = mlp()
        optimizer = data.scheduled(sgd(model), model)
        train(data, model, optimizer, 2)
        ends.watch(model, model[0].weight, optimizer._exchange, *_buffers(optimizer))

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        ends = _Ends()
        fold(data, ends)
        together.wait()
        another = mlp()
        data.scheduled(sgd(another), another)
        assert not ends.alive()

    gc.disable()
    try:
        run(loop)
    finally:
        gc.enable()


def test_a_norm_that_is_kept_and_not_read_keeps_no_model() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[bool]:
        ends = _Ends()

        def fold() -> list[torch.Tensor]:
            model = mlp()
            optimizer = data.scheduled(sgd(model), model)
            ends.watch(model, model[0].weight)
            norms = []
            for step in range(6):
                optimizer.zero_grad()
                data.loss(model, step).backward()
                norms.append(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
                optimizer.step()
            optimizer.synchronize()
            return norms[:-1]

        norms = fold()
        together.wait()
        if data.ranks == [0]:
            gc.collect()
        together.wait()
        assert ends.alive() == []
        return [type(norm) is Deferred for norm in norms]

    together = threading.Barrier(2, timeout=60)
    assert run(loop)[0][-1], "no norm was deferred"


@ORDERED
def test_ranks_may_collect_a_dropped_model_at_different_times(ordered: bool) -> None:
    """One frees it at once, the other only when the session closes; those after it train as ever."""
    kept = []

    def loop(data: Data, model: Any, optimizer: Any) -> list[list[torch.Tensor]]:
        results = []
        for fold in range(3):
            twin = copy.deepcopy(model)
            its_optimizer = data.scheduled(sgd(twin), twin)
            for step in range(2):
                its_optimizer.zero_grad()
                data.loss(twin, 10 * fold + step).backward()
                its_optimizer.step()
            results.append([parameter.detach().clone() for parameter in twin.parameters()])
            data.loss(twin, 5).backward()  # a round that no rank ends
            if data.ranks[0] == 1:
                kept.append((twin, its_optimizer))
            del twin, its_optimizer
            gc.collect()
        return results

    require_plain(loop, ordered=ordered)


def test_a_rank_that_steps_with_a_model_that_another_has_dropped_is_told() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        twin = mlp()
        its_optimizer = data.scheduled(sgd(twin), twin)
        data.loss(twin).backward()
        if data.ranks == [0]:
            del twin, its_optimizer
            gc.collect()
        else:
            its_optimizer.step()
            data.loss(twin, 1)

    with pytest.raises(commsched.TransportError, match=r"rank 1 called step\(\) in step 0, but rank 0 dropped the gradients"):
        run(loop)


@pytest.mark.parametrize(
    "way", ["in one line", "after del", "with a scheduler that keeps the first", "while backward is over", "zeroed", "kept"]
)
@ORDERED
def test_a_second_optimizer_for_the_same_parameters_takes_the_place_of_the_first(ordered: bool, way: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        keeps = torch.optim.lr_scheduler.StepLR(optimizer, 10) if "scheduler" in way else None
        for step in range(2):
            optimizer.zero_grad(set_to_none=way not in ("zeroed", "kept"))
            data.loss(model, step).backward()
            optimizer.step()
        if way == "after del":
            del optimizer
            gc.collect()
        if way == "while backward is over":
            data.loss(model, 7).backward()
            model.zero_grad()
        optimizer = data.scheduled(_adam(model), model)
        for step in (2, 3):
            if way != "kept" or step == 3:
                optimizer.zero_grad(set_to_none=way != "zeroed")
            data.loss(model, step).backward()
            optimizer.step()
        del keeps
        return optimizer.state_dict()

    require_plain(loop, ordered=ordered)


def test_the_first_optimizer_does_not_step_any_more() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        second = data.scheduled(torch.optim.SGD(model[2].parameters(), lr=0.1), model)
        train(data, model, second, 1, 1)
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"has ended, since another one was made for its parameter '2\.weight'"):
        run(loop)


def test_a_first_optimizer_that_only_some_ranks_have_detached_is_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        if data.ranks == [1]:
            optimizer.detach()
        data.scheduled(_adam(model), model)

    message = r"parameter '0\.weight' belongs to an earlier ScheduledOptimizer on rank 0 but no other one on rank 1"
    with pytest.raises(commsched.CommschedError, match=message):
        run(loop)


def test_gradients_are_averaged_as_long_as_there_is_a_model() -> None:
    """Whoever drops the optimizer and makes the updates by hand trains on averages still. The optimizer's state is freed."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        twin = copy.deepcopy(model)
        its_optimizer, ends = data.scheduled(sgd(twin), twin), _Ends()
        train(data, twin, its_optimizer, 1)
        ends.watch(its_optimizer)
        del its_optimizer
        for step in range(1, 3):
            twin.zero_grad()
            data.loss(twin, step).backward()
            gc.collect()
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter -= 0.1 * parameter.grad
        assert not ends.alive()
        return list(twin.parameters())

    require_plain(loop)


def test_a_gradient_of_a_model_that_is_gone_says_so() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        twin = mlp()
        its_optimizer = data.scheduled(sgd(twin), twin)
        data.loss(twin).backward()
        gradient = twin[0].weight.grad
        del twin, its_optimizer
        gc.collect()
        gradient.sum()

    with pytest.raises(commsched.CommschedError, match=r"the gradient of '0\.weight' is read, but its model is gone"):
        run(loop)
