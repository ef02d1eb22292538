"""A signal handler, or a finalizer, reads the model while its thread waits to make an update, and makes that update itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from commsched.core.errors import UnsupportedError
from commsched.core.group import DependencyProxy
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.edits import Edit
from commsched.plugins.torch.exchange import GradientExchange
from commsched.session.norms import Norms

from .loop import Data, require_plain


def train(data: Data, model: nn.Module, optimizer: Any, clips: bool = False) -> None:
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        data.loss(model, step).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("reads", ["parameters", "gradients"])
@pytest.mark.parametrize(
    ("owner", "wait", "clips"),
    [
        (GradientExchange, "wait_to_update", False),
        (GradientExchange, "kept_by_any_rank", False),
        (GradientExchange, "those_there", False),
        (Edit, "wait", True),
        (GradientExchange, "wait_to_update", True),
        (DependencyProxy, "wait", False),
        (DependencyProxy, "wait", True),
        (Norms, "wait", True),
    ],
)
def test_a_handler_that_reads_the_model_in_a_wait_changes_nothing(
    owner: type, wait: str, clips: bool, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = threading.local()  # of each rank
    handled: list[int] = []
    waited = getattr(owner, wait)

    def handle() -> None:
        if getattr(mine, "model", None) is not None:
            model, mine.model = mine.model, None
            for parameter in model.parameters():
                read = parameter if reads == "parameters" else parameter.grad
                handled.append(read is not None and read.detach().abs().sum().item() >= 0)
            mine.model = model

    def interrupted_wait(self: Any, *arguments: Any) -> Any:
        if wait == "wait":  # it holds what it holds while it waits
            handle()
        found = waited(self, *arguments)
        if wait == "those_there":
            found = list(found)
        handle()
        return found

    def interrupted(data: Data, model: nn.Module, optimizer: Any) -> None:
        mine.model = model if isinstance(optimizer, ScheduledOptimizer) else None
        try:
            train(data, model, optimizer, clips)
        finally:
            mine.model = None

    monkeypatch.setattr(owner, wait, interrupted_wait)
    require_plain(interrupted)
    assert any(handled)


def test_a_handler_that_reads_the_model_while_gradients_are_edited_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would update with gradients that are edited by half."""
    mine = threading.local()
    refused: list[str] = []
    applied = Edit.apply

    def interrupted_apply(self: Edit, gradients: list[torch.Tensor]) -> None:
        for parameter in getattr(mine, "model", nn.Module()).parameters():
            try:
                parameter.detach().sum().item()  # some may be up to date
            except UnsupportedError as error:
                refused.append(str(error))
        applied(self, gradients)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            if isinstance(optimizer, ScheduledOptimizer):
                mine.model = model
                optimizer.synchronize()
                mine.model = nn.Module()

    monkeypatch.setattr(Edit, "apply", interrupted_apply)
    require_plain(loop)
    assert refused
    assert all("reads the model while the gradients are clipped or edited" in text for text in refused)


def test_a_finalizer_that_runs_in_a_thread_of_commsched_does_not_wait_there() -> None:
    """Averages come by that thread. Python's garbage collector calls finalizers in whichever thread makes objects."""
    refused: list[str] = []

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            optimizer.step()
            if not isinstance(optimizer, ScheduledOptimizer) or not optimizer._pending:
                continue
            name = f"commsched-dispatch of rank {data.session.rank}"
            thread = threading.Thread(target=finalize, args=(model,), name=name)
            thread.start()
            thread.join()

    def finalize(model: nn.Module) -> None:
        for parameter in (*model.parameters(), *(parameter.grad for parameter in model.parameters())):
            try:
                torch.sum(parameter)
            except UnsupportedError as error:
                refused.append(str(error))

    require_plain(loop)
    assert any("'0.weight', whose update is outstanding, is read in the thread commsched-dispatch" in text for text in refused)
