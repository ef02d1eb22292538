"""A second thread reads the model while the first trains: the update that it makes meets nothing of what the first one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, optim

from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.exchange import GradientExchange

from ..where import here
from .loop import Data, mlp, require_plain

PATIENCE_SECONDS = 60


class Gate:
    """An update that has begun waits here."""

    def __init__(self) -> None:
        self.updating, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.updating.set()
        assert self.go_on.wait(PATIENCE_SECONDS)


class Gated(optim.SGD):
    gate: Gate | None = None

    def step(self, closure: Any = None) -> Any:
        if self.gate is not None:
            self.gate.wait()
        return super().step(closure)


def gated(model: nn.Module) -> optim.Optimizer:
    return Gated(model.parameters(), lr=0.1, momentum=0.9)


def wrapped_per_parameter(data: Data, model: nn.Module, optimizer: Any) -> Any:
    if not isinstance(optimizer, ScheduledOptimizer):
        return optimizer
    optimizer.detach()
    return ScheduledOptimizer(optimizer.optimizer, model, session=data.session, per_parameter=True)


@contextmanager
def read_by_another_thread(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Within, another thread is in the midst of an update."""
    if not isinstance(optimizer, ScheduledOptimizer):
        yield
        return
    gate = Gate()
    optimizer.optimizer.gate = gate  # type: ignore[attr-defined]
    reader = threading.Thread(target=lambda: [parameter.sum() for parameter in model.parameters()], daemon=True)
    reader.start()
    try:
        assert gate.updating.wait(PATIENCE_SECONDS)
        yield
    finally:
        gate.go_on.set()
        reader.join(PATIENCE_SECONDS)
        assert not reader.is_alive()


def own(optimizer: Any) -> Any:
    """The user's optimizer, kept when it was wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _drop_by_hand(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _halve(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["lr"] *= 0.5


def _replace_groups(model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    optimizer.param_groups = [{**group, "lr": group["lr"] * 0.5} for group in optimizer.param_groups]


MEANWHILE: dict[str, Callable[[nn.Module, Any, Any], Any]] = {
    "zero_grad": lambda model, optimizer, scheduler: optimizer.zero_grad(),
    "zero_grad to zeros": lambda model, optimizer, scheduler: optimizer.zero_grad(set_to_none=False),
    "zero_grad of the user's optimizer": lambda model, optimizer, scheduler: own(optimizer).zero_grad(),
    "zero_grad of the model": lambda model, optimizer, scheduler: model.zero_grad(),
    "grad = None": _drop_by_hand,
    "scheduler": lambda model, optimizer, scheduler: scheduler.step(),
    "lr": lambda model, optimizer, scheduler: _halve(optimizer.param_groups),
    "lr of the user's optimizer": lambda model, optimizer, scheduler: _halve(own(optimizer).param_groups),
    "groups replaced": _replace_groups,
}


@pytest.mark.parametrize("name", MEANWHILE)
def test_what_the_training_thread_does_meanwhile(name: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        optimizer = wrapped_per_parameter(data, model, optimizer)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(2):
            data.loss(model, step).backward()
            optimizer.step()
            with read_by_another_thread(model, optimizer):
                MEANWHILE[name](model, optimizer, scheduler)
        own(optimizer).gate = None
        data.loss(model, 2).backward()
        optimizer.step()
        [parameter.sum() for parameter in model.parameters()]
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
        return gradients, [group["lr"] for group in optimizer.param_groups], [len(g["params"]) for g in optimizer.param_groups]

    require_plain(loop, optimizer=gated)


class Reads(optim.SGD):
    """Before an update of the first layer's weights, it does once what it finds in ``before``."""

    before: list[Callable[[], None]] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.before and any(parameter.shape == (8, 4) for parameter in self.param_groups[0]["params"]):
            self.before.pop()()
        return super().step(closure)


class Made:
    """It takes the place of an elastic job's ``Undo``, and counts the updates that are noted as made."""

    made = 0

    def copy_while(self, *_: Any) -> None: ...

    def before_update(self, *_: Any) -> None: ...

    def after_update(self) -> None:
        self.made += 1


def test_another_thread_waits_for_an_update_within_which_the_last_one_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's optimizer reads the last layer while it updates the first: no update is outstanding then, but one runs."""
    monkeypatch.setattr(GradientExchange, "those_there", lambda *_: ())  # else one update would be of both layers

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        optimizer = wrapped_per_parameter(data, model, optimizer)
        seen: list[torch.Tensor] = []
        another = threading.Thread(target=lambda: seen.append(model[0].weight * 1), daemon=True)
        data.loss(model, 0).backward()
        optimizer.step()
        if isinstance(optimizer, ScheduledOptimizer):

            def read_all() -> None:
                for parameter in list(model.parameters())[1:]:
                    parameter.sum()
                assert not optimizer._pending
                another.start()
                another.join(0.2)  # without the wait, the thread reads the old value within this time
                assert another.is_alive()

            optimizer.optimizer.before = [read_all]  # type: ignore[attr-defined]
            undo = Made()
            optimizer._undo = undo  # type: ignore[assignment]
            model[0].weight.sum()
            assert undo.made == 1, "an update counted as made that was still half made"
            optimizer._undo = None
            assert not optimizer.optimizer.before  # type: ignore[attr-defined]
            assert optimizer._exchange.put_in_place is None  # type: ignore[union-attr]
        else:
            another.start()
        another.join(PATIENCE_SECONDS)
        return seen

    require_plain(loop, optimizer=lambda model: Reads(model.parameters(), lr=0.1))


def _zero_gradient(model: Any) -> None:
    model[0].weight.grad.zero_()


def _read_by_torchscript(model: Any) -> None:
    read = torch.jit.CompilationUnit("def f(w):\n  return w.sum()\n").f
    read(model[0].weight)


def _write(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(1)


@pytest.mark.parametrize("act", [_zero_gradient, _read_by_torchscript, _write])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_what_needs_values_waits_until_the_update_is_made(act: Callable[[Any], None]) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        optimizer = wrapped_per_parameter(data, model, optimizer)
        data.loss(model).backward()
        optimizer.step()
        if len(data.ranks) > 1:
            return act(model)
        third = threading.Thread(target=act, args=(model,), daemon=True)
        with read_by_another_thread(model, optimizer):
            third.start()
            third.join(0.05)  # it must not come through, however long it is given
            came_through = not third.is_alive()
            both.wait()  # else the failure of one rank would be that of the other
        third.join(PATIENCE_SECONDS)
        assert not third.is_alive()
        assert not came_through

    require_plain(loop, optimizer=gated)


def test_a_graph_from_before_step_is_not_differentiated_into_an_update() -> None:
    """No forward reads what it adds to, so nothing but backward itself waits for the update that another thread is making."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        optimizer = wrapped_per_parameter(data, model, optimizer)
        loss = data.loss(model)
        loss.backward(retain_graph=True)
        optimizer.step()
        backward = threading.Thread(target=lambda: loss.backward(retain_graph=True), daemon=True)
        with read_by_another_thread(model, optimizer):
            backward.start()
            backward.join(0.05)
        backward.join(PATIENCE_SECONDS)
        own(optimizer).gate = None
        optimizer.step()

    require_plain(loop, model=Shift, optimizer=gated)


def test_ranks_with_a_thread_that_reads_all_the_time() -> None:
    """As it comes: an evaluation that never stops, a scheduler, and clipping."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        over = threading.Event()
        errors: list[BaseException] = []

        def evaluate() -> None:
            try:
                while not over.is_set():
                    with torch.no_grad():
                        model(here(torch.ones(3, 4, dtype=torch.float64)))
            except BaseException as error:
                errors.append(error)

        reader = threading.Thread(target=evaluate, daemon=True)
        if isinstance(optimizer, ScheduledOptimizer):
            reader.start()
        try:
            for step in range(20):
                data.loss(model, step).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        finally:
            over.set()
            if reader.ident is not None:
                reader.join(PATIENCE_SECONDS)
        if errors:
            raise errors[0]
        return [group["lr"] for group in optimizer.param_groups]

    require_plain(loop, model=mlp, optimizer=lambda model: optim.AdamW(model.parameters(), lr=0.01))
