"""Parameters read after step() are updated, whoever reads them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from commsched import Session
from commsched.core.interfaces import Transport
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch import optimizer as optimizer_module
from commsched.testing.check_plugin import Delayed

from .loop import Data, batch, mlp, require_plain, run, train

READERS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda model: [p.detach().clone() for p in model.parameters()],
    "state_dict": lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    "deepcopy": lambda model: [p.detach() for p in copy.deepcopy(model).parameters()],
    "pickle": lambda model: [p.detach() for p in pickle.loads(pickle.dumps(model)).parameters()],
    "data": lambda model: [p.data.clone() for p in model.parameters()],
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).detach().clone(),
    "averaged model": lambda model: [p.detach() for p in swa_utils.AveragedModel(model).parameters()],
    "norms": lambda model: [p.norm().item() for p in model.parameters()],
    "foreach norms": lambda model: [norm.item() for norm in torch._foreach_norm(list(model.parameters()))],
    "last layer first": lambda model: [p.sum().item() for p in reversed(list(model.parameters()))],
    "one parameter": lambda model: [p.sum().item() for p in list(model.parameters())[2:3]],
    "histogram": lambda model: [p.histc(4, -1, 1) for p in model.parameters()],
    "finite": lambda model: all(p.isfinite().all() for p in model.parameters()),
    "inference": lambda model: _outputs(model),
    "printed": lambda model: _weights_as_text(model),
}


def _outputs(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(batch(7)).clone()


def _weights_as_text(model: nn.Module) -> None:
    assert "nan" not in repr(list(model.parameters()))


@pytest.mark.parametrize("name", READERS)
def test_readers_between_step_and_the_next_forward(name: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        read = []
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            read.append(READERS[name](model))
        return read

    require_plain(loop)


def _clamp(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.2, 0.2)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _from_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def _through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _new_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _reset(model: nn.Module) -> None:
    with torch.no_grad():
        nn.init.ones_(model[0].weight)  # type: ignore[index,arg-type]


WRITERS: dict[str, Callable[[nn.Module], None]] = {
    "clamp": _clamp,
    "load_state_dict": _load,
    "vector_to_parameters": _from_vector,
    "in place through data": _through_data,
    "data replaced": _new_data,
    "init": _reset,
}


@pytest.mark.parametrize("between", ["step and forward", "backward and step"])
@pytest.mark.parametrize("name", WRITERS)
def test_parameters_written_by_hand(name: str, between: str) -> None:
    """Weight clipping, a restart: the outstanding update comes before, or, between backward and step(), after."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if between == "backward and step":
                WRITERS[name](model)
            optimizer.step()
            if between == "step and forward":
                WRITERS[name](model)

    require_plain(loop)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


AVERAGES: dict[str, Callable[[nn.Module], swa_utils.AveragedModel]] = {
    "equal": swa_utils.AveragedModel,
    "ema": lambda model: swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8)),
    "ema, one by one": lambda model: swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(0.8)),
    "swa": lambda model: swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_swa_multi_avg_fn()),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models(name: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        average = AVERAGES[name](model)
        for step in range(4):
            train(data, model, optimizer, steps=1, first=step)
            average.update_parameters(model)
        swa_utils.update_bn([batch(7), batch(8)], average)
        return average.state_dict()

    require_plain(loop, model=lambda: Normalised().double())


def test_an_average_by_hand() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        shadow = copy.deepcopy(model).requires_grad_(False)
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            with torch.no_grad():
                for mean, parameter in zip(shadow.parameters(), model.parameters()):
                    mean.mul_(0.9).add_(parameter, alpha=0.1)
        return list(shadow.parameters())

    require_plain(loop)


EVALUATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "no_grad": lambda model: _evaluate(model, torch.no_grad()),
    "inference_mode": lambda model: _evaluate(model, torch.inference_mode()),
    "autocast": lambda model: _evaluate(model, torch.autocast("cpu", dtype=torch.bfloat16)),
    "set_grad_enabled": lambda model: _evaluate(model, torch.set_grad_enabled(False)),
}


def _evaluate(model: nn.Module, mode: Any) -> torch.Tensor:
    model.eval()
    with mode:
        outputs = model(batch(9))
    model.train()
    return outputs.clone()


@pytest.mark.parametrize(
    ("name", "where"),
    [("no_grad", "first"), ("inference_mode", "before step"), *((name, "after step") for name in EVALUATIONS)],
)
def test_evaluation(name: str, where: str) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        outputs = [EVALUATIONS[name](model)] if where == "first" else []
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if where == "before step" and step != 1:
                outputs.append(EVALUATIONS[name](model))
            optimizer.step()
            if where == "after step" and step != 1:
                outputs.append(EVALUATIONS[name](model))
        return outputs

    require_plain(loop)


def test_updates_within_autocast_are_not_made_in_16_bits() -> None:
    """Evaluation is the first to read the parameters, and this optimizer multiplies matrices."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step, torch.float32).backward()
            optimizer.step()
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                model(batch(9, dtype=torch.float32))

    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.1)

    require_plain(loop, model=lambda: mlp().float(), optimizer=adafactor, tolerance=1e-5)


def test_evaluation_by_one_rank_only() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            train(data, model, optimizer, steps=1, first=step)
            if 0 in data.ranks:
                _evaluate(model, torch.inference_mode())

    require_plain(loop)


def test_hooks_of_the_users_optimizer_may_read_the_model() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        users = getattr(optimizer, "optimizer", optimizer)
        users.register_step_pre_hook(lambda *_: [p.sum() for p in model.parameters()] and None)
        users.register_step_post_hook(lambda *_: copy.deepcopy(model) and None)
        train(data, model, optimizer)

    require_plain(loop)


def test_hooks_of_the_scheduled_optimizer_run_once_per_step() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append([p.detach().clone() for p in model.parameters()]))
        train(data, model, optimizer)
        return seen

    require_plain(loop)


def test_step_with_a_closure() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        def closure() -> torch.Tensor:
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = data.loss(model)
            loss.backward()
            calls.append(loss.item())
            return loss

        calls: list[float] = []
        for _ in range(3):
            with torch.no_grad():
                assert optimizer.step(closure).item() == calls[-1]
        return len(calls)

    require_plain(loop)


def test_a_closure_returns_when_all_averages_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer may read gradients in ways that no guard sees."""
    there: list[bool] = []

    def mean_loss(session: Session, loss: torch.Tensor) -> torch.Tensor:
        there.append(all(proxy.is_open for group in session.core._groups.values() for proxy in group.proxies))
        return loss

    def slow(transport: Transport) -> Transport:
        return Delayed(transport, transport.rank, 0.05)

    class CallsTwice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = data.loss(model)
            loss.backward()
            return loss

        optimizer.step(closure)

    monkeypatch.setattr(optimizer_module, "mean_loss", mean_loss)
    run(loop, optimizer=lambda model: CallsTwice(model.parameters(), lr=0.1), wrap_transport=slow)
    assert there == [True] * 4


def test_a_second_thread_waits_for_an_update_that_the_first_is_making() -> None:
    both = threading.Barrier(2, timeout=60)

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        if len(data.ranks) > 1:
            train(data, model, optimizer, steps=1)
            return model[0].weight.detach().clone()
        updating, go_on = threading.Event(), threading.Event()
        reads: list[torch.Tensor] = []

        def pause(*_: Any) -> None:
            updating.set()
            assert go_on.wait(60)

        optimizer.detach()
        optimizer = ScheduledOptimizer(optimizer.optimizer, model, session=data.session, per_parameter=True)
        optimizer.optimizer.register_step_pre_hook(pause)
        train(data, model, optimizer, steps=1)
        first = threading.Thread(target=lambda: model[0].weight.sum(), daemon=True)
        second = threading.Thread(target=lambda: reads.append(model[0].weight.detach().clone()), daemon=True)
        first.start()
        assert updating.wait(60)
        second.start()
        second.join(0.05)  # it must not come through, however long it is given
        came_through = bool(reads)
        both.wait()  # else the failure of one rank would be that of the other
        go_on.set()
        first.join(60)
        second.join(60)
        assert not came_through
        return reads[0]

    require_plain(loop)


class SameMemory(nn.Module):
    """Two parameters, not one: each has a gradient and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.front = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.relu(self.front(x)))


def same_memory() -> nn.Module:
    model = SameMemory()
    model.front.weight.data = model.back.weight.data
    return model


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_in_the_same_memory(frozen: bool, added: bool) -> None:
    def first_parameters(model: Any) -> list[nn.Parameter]:
        return [*model.back.parameters()] if added or frozen else [*model.parameters()]

    def make(model: Any) -> torch.optim.Optimizer:
        model.front.weight.requires_grad_(not frozen)
        return torch.optim.Adam(first_parameters(model), lr=0.1)

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        if added:
            optimizer.add_param_group({"params": [each for each in model.front.parameters() if each.requires_grad]})
        else:
            model.front.bias.requires_grad_(not frozen)
        train(data, model, optimizer, steps=4)

    require_plain(loop, model=same_memory, optimizer=make)


def test_parameters_side_by_side_in_one_buffer_are_not_waited_for() -> None:
    def make() -> nn.Module:
        model = mlp()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(flat, model.parameters())  # views of it
        return model

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        train(data, model, optimizer)
        assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
        return getattr(optimizer, "_why_step_waits", None)

    require_plain(loop, model=make)


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_graph_kept_over_step_does_not_touch_what_is_outstanding(zeroed: bool) -> None:
    """No forward reads the parameter between the backward passes, so nothing else waits for its update."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        loss = data.mean(lambda rank: (model(batch(rank)) * batch(rank, 1)).mean())
        for _ in range(3):
            if zeroed:
                optimizer.zero_grad()
            loss.backward(retain_graph=True)
            optimizer.step()

    require_plain(loop, model=Shift)
