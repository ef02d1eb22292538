"""What training loops do between the lines: each reading is fresh, each misuse is named."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import SchedulerConfig, Session
from commsched.core.ports import Transport
from commsched.plugins.torch import ScheduledOptimizer
from commsched.session import local_sessions
from commsched.testing.fakes import Delayed
from commsched.testing.world import run_world

Loop = Callable[[Session, nn.Module, torch.optim.Optimizer], Any]


SMALL, LARGE = SchedulerConfig(64, 128), SchedulerConfig()  # every tensor cut; all tensors merged


def run(
    loop: Loop, world_size: int = 2, model: Callable[[], nn.Module] | None = None, config: SchedulerConfig = SMALL
) -> list[Any]:
    """``loop(session, model, optimizer)`` on every rank, with sends and replies delayed."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        return model() if model is not None else nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()

    def rank_loop(rank: int) -> Any:
        with sessions[rank] as session:
            plain = torch.optim.SGD(models[rank].parameters(), lr=0.1, momentum=0.9)
            return loop(session, models[rank], ScheduledOptimizer(plain, models[rank], session=session))

    def delayed(transport: Transport) -> Transport:
        return Delayed(transport, transport.rank, 0.002)

    models = [make() for _ in range(world_size)]
    sessions = local_sessions(world_size, config, wrap_transport=delayed)
    try:
        return run_world(world_size, rank_loop, timeout_seconds=30)
    finally:
        for session in sessions:
            session.abort("the test is over")


def batch(session: Session, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * session.rank + step)
    return torch.randn(5, 4, generator=generator, dtype=torch.float64)


def joint(model: nn.Module, world_size: int, step: int = 0) -> torch.Tensor:
    """The loss whose gradient the average is."""
    inputs = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(100 * rank + step)
        inputs.append(torch.randn(5, 4, generator=generator, dtype=torch.float64))
    return model(torch.cat(inputs)).square().mean()


def plain_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


READERS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "parameters": lambda model: [p.detach().clone() for p in model.parameters()],
    "state_dict": lambda model: [p.clone() for p in model.state_dict().values()],
    "deepcopy": lambda model: [p.detach() for p in copy.deepcopy(model).parameters()],
    "data": lambda model: [p.data.clone() for p in model.parameters()],
    "vector": lambda model: list(nn.utils.parameters_to_vector(model.parameters()).detach().split([32, 8, 16, 2])),
    "averaged model": lambda model: [p.detach() for p in torch.optim.swa_utils.AveragedModel(model).parameters()],
}


def require_plain_result(loop: Loop) -> None:
    """The weights that ``loop`` returns on every rank after three steps are those of plain training with all batches."""
    model, optimizer = plain_model()
    for step in range(3):
        optimizer.zero_grad()
        joint(model, 2, step).backward()
        optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


@pytest.mark.parametrize("name", READERS)
def test_parameters_read_after_step_are_updated(name: str) -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        model(batch(session)).square().mean().backward()
        optimizer.step()
        return READERS[name](model)

    model, optimizer = plain_model()
    joint(model, 2).backward()
    optimizer.step()
    for read in run(loop):
        assert all(close(a.reshape(b.shape), b) for a, b in zip(read, model.parameters(), strict=True))


@pytest.mark.parametrize("config", [SMALL, LARGE])
def test_gradients_read_before_step_are_averages(config: SchedulerConfig) -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        model(batch(session)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        return norm, clipped, [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    joint(model, 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    for read_norm, read_gradients, read in run(loop, config=config):
        assert close(read_norm, norm)
        assert all(close(a, b) for a, b in zip(read_gradients, gradients, strict=True))
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("of_model", [True, False])
def test_zero_grad_directly_after_step_loses_nothing(set_to_none: bool, of_model: bool) -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for step in range(4):
            model(batch(session, step)).square().mean().backward()
            optimizer.step()
            (model if of_model else optimizer).zero_grad(set_to_none=set_to_none)
            for parameter in model.parameters():
                assert parameter.grad is None if set_to_none else not parameter.grad.any()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    for step in range(4):
        optimizer.zero_grad()
        joint(model, 2, step).backward()
        optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


def test_gradients_accumulate_over_steps_when_never_zeroed() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for step in range(3):
            model(batch(session, step)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    for step in range(3):
        joint(model, 2, step).backward()
        optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


@pytest.mark.parametrize("last_within", [False, True])
def test_no_sync_accumulates(last_within: bool) -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> Any:
        for first in (0, 2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                model(batch(session, first)).square().mean().backward()
                if last_within:
                    model(batch(session, first + 1)).square().mean().backward()
            if not last_within:
                model(batch(session, first + 1)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    for first in (0, 2):
        optimizer.zero_grad()
        (joint(model, 2, first) + joint(model, 2, first + 1)).backward()
        optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


def test_a_second_backward_before_step_is_refused_by_name() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch(session)).square().mean().backward()
        model(batch(session)).square().mean().backward()

    with pytest.raises(commsched.CommschedError, match=r"second gradient of '2\.\w+' before step.*no_sync"):
        run(loop)


def test_learning_rate_counts_as_of_step() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        model(batch(session)).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e9
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    joint(model, 2).backward()
    optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


class Branches(nn.Module):
    """Rank-dependent and never-used parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.sometimes, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.shared(x) + self.sometimes(x) if both else self.shared(x)


@pytest.mark.parametrize("config", [SMALL, LARGE])
def test_parameters_that_only_some_ranks_use(config: SchedulerConfig) -> None:
    """The average counts a rank without gradient as zero; a parameter that nobody used is left alone, decay included."""

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        optimizer.param_groups[0]["weight_decay"] = 0.1
        for step in range(3):
            optimizer.zero_grad()
            model(batch(session, step), session.rank == 1).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(3)
    model = Branches().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = []
        for rank in range(2):
            generator = torch.Generator().manual_seed(100 * rank + step)
            inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
            losses.append(model(inputs, rank == 1).square().mean())
        (sum(losses) / 2).backward()
        optimizer.step()
    for read in run(loop, model=lambda: Branches().double(), config=config):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


@pytest.mark.parametrize("both", [True, False])
def test_clipping_with_parameters_that_are_not_used(both: bool) -> None:
    """All tensors share one partition, which does not become ready by backward alone."""

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        model(batch(session), both).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return norm, [p.detach().clone() for p in model.parameters()]

    results = run(loop, model=lambda: Branches().double(), config=LARGE)
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_clipping_where_only_some_ranks_have_a_gradient_is_an_error() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch(session), session.rank == 1).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"'sometimes\.\w+' has one on other ranks and none on rank 0"):
        run(loop, model=lambda: Branches().double(), config=LARGE)


def test_one_rank_may_log_its_gradients() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            if session.rank == 0:
                assert all(p.grad.isfinite().all() for p in model.parameters())
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    first, second = run(loop, config=LARGE)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_late_reader_too_is_told_that_only_some_ranks_have_a_gradient() -> None:
    """All averages that are read may be there by then."""

    def loop(session: Session, model: nn.Module, optimizer: Any) -> None:
        model(batch(session), session.rank == 1).square().mean().backward()
        for slot in optimizer._exchange.slots[:2]:
            optimizer._exchange.buffers.gradients.proxies[slot.tensor].wait()
        nn.utils.clip_grad_norm_(model.shared.parameters(), 0.01)
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"'sometimes\.\w+' has one on other ranks and none on rank 0"):
        run(loop, model=lambda: Branches().double())


@pytest.mark.parametrize("change", ["halve", "drop", "clip and drop"])
def test_gradients_replaced_between_backward_and_step_are_what_the_update_uses(change: str) -> None:
    def edit(model: nn.Module) -> None:
        weight = model[0].weight
        if change == "clip and drop":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        weight.grad = weight.grad * 0.5 if change == "halve" else None

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            edit(model)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    for step in range(3):
        optimizer.zero_grad()
        joint(model, 2, step).backward()
        edit(model)
        optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


def _within_no_sync(optimizer: Any, loss: torch.Tensor) -> None:
    with optimizer.no_sync():
        loss.backward()


def _replace_memory(model: nn.Module) -> None:
    gradient = model[0].weight.grad
    gradient.data = gradient.data.clone()


REFUSED_IN_THE_LOOP: dict[str, tuple[Callable[[nn.Module, Any, torch.Tensor], Any], str]] = {
    "memory replaced": (
        lambda model, optimizer, loss: (loss.backward(), _replace_memory(model)),
        r"the memory of '0\.weight'\.grad was replaced through \.data",
    ),
    "local after averaged": (
        lambda model, optimizer, loss: (loss.backward(retain_graph=True), _within_no_sync(optimizer, loss)),
        r"a second gradient of '2\.\w+' before step\(\)",
    ),
    "create_graph": (lambda model, optimizer, loss: loss.backward(create_graph=True), r"has a graph \(create_graph=True\)"),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("name", REFUSED_IN_THE_LOOP)
def test_what_would_spoil_a_gradient_is_refused_by_name(name: str) -> None:
    act, message = REFUSED_IN_THE_LOOP[name]

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        act(model, optimizer, model(batch(session)).square().mean())
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=message):
        run(loop)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_a_graph_kept_over_step_does_not_touch_what_is_outstanding() -> None:
    """No forward reads the parameter between the backward passes, so nothing else waits for its update."""

    def loss_of_rank(model: nn.Module, rank: int) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(10 * rank + number) for number in range(2)]
        inputs, weights = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for generator in generators)
        return (model(inputs) * weights).mean()

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        loss = loss_of_rank(model, session.rank)
        for _ in range(3):
            loss.backward(retain_graph=True)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model = Shift()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = (loss_of_rank(model, 0) + loss_of_rank(model, 1)) / 2
    for _ in range(3):
        loss.backward(retain_graph=True)
        optimizer.step()
    for read in run(loop, model=Shift):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


def test_hooks_of_the_users_optimizer_may_read_the_model() -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> Any:
        optimizer.optimizer.register_step_pre_hook(lambda *_: [p.sum() for p in model.parameters()] and None)
        optimizer.optimizer.register_step_post_hook(lambda *_: copy.deepcopy(model) and None)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    require_plain_result(loop)


def test_a_second_thread_waits_for_an_update_that_the_first_is_making() -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> Any:
        updating, go_on = threading.Event(), threading.Event()
        reads: list[torch.Tensor] = []

        def pause(*_: Any) -> None:
            updating.set()
            assert go_on.wait(10)

        optimizer.optimizer.register_step_pre_hook(pause)
        model(batch(session)).square().mean().backward()
        optimizer.step()
        first = threading.Thread(target=lambda: model[0].weight.sum(), daemon=True)
        second = threading.Thread(target=lambda: reads.append(model[0].weight.detach().clone()), daemon=True)
        first.start()
        assert updating.wait(10)
        second.start()
        second.join(0.05)  # it must not come through, however long it is given
        assert not reads
        go_on.set()
        first.join(10)
        second.join(10)
        return reads[0]

    model, optimizer = plain_model()
    joint(model, 2).backward()
    optimizer.step()
    for read in run(loop):
        assert close(read, model[0].weight.detach())


def test_parameters_beside_the_model_begin_as_those_of_rank_0() -> None:
    def rank_loop(rank: int) -> torch.Tensor:
        with sessions[rank] as session:
            model, beside = models[rank], extras[rank]
            optimizer = ScheduledOptimizer(torch.optim.SGD([*model.parameters(), beside], lr=0.1), model, session=session)
            (model(batch(session)).sum() * beside).sum().backward()
            optimizer.step()
            return beside.detach().clone()

    models = [plain_model()[0] for _ in range(2)]
    extras = [nn.Parameter(torch.full((3,), float(rank), dtype=torch.float64)) for rank in range(2)]
    sessions = local_sessions(2)
    first, second = run_world(2, rank_loop, timeout_seconds=30)
    assert torch.equal(first, second)


def test_a_model_may_be_wrapped_again_after_detach() -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> Any:
        model(batch(session)).square().mean().backward()
        optimizer.step()
        optimizer.detach()
        optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, session=session)
        optimizer.zero_grad()
        model(batch(session, 1)).square().mean().backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    joint(model, 2).backward()
    optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.zero_grad()
    joint(model, 2, 1).backward()
    optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


def test_a_model_wrapped_twice_is_refused_by_name() -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> None:
        ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model, session=session)

    with pytest.raises(commsched.CommschedError, match=r"parameter '0\.weight' belongs to another ScheduledOptimizer"):
        run(loop)


def test_copies_of_the_optimizer_are_the_users_own() -> None:
    def loop(session: Session, model: nn.Module, optimizer: Any) -> None:
        optimizer.register_state_dict_post_hook(lambda *_: None)
        assert type(copy.deepcopy(optimizer)) is torch.optim.SGD

    run(loop)


def test_reading_a_gradient_within_backward_is_refused() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[2].weight.register_post_accumulate_grad_hook(lambda p: print(p.grad.sum()))
        model(batch(session)).square().mean().backward()

    with pytest.raises(commsched.CommschedError, match=r"'2\.weight' is read within backward"):
        run(loop, config=LARGE)


def test_all_ranks_may_drop_a_step() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for step in range(4):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            if step != 1:
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    for step in (0, 2, 3):
        optimizer.zero_grad()
        joint(model, 2, step).backward()
        optimizer.step()
    for read in run(loop):
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


def test_a_step_dropped_by_one_rank_only_is_an_error() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            if session.rank == 0 or step != 1:
                optimizer.step()

    with pytest.raises(commsched.TransportError, match=r"called step\(\) in step \d, but another rank dropped"):
        run(loop)


def test_step_closure_returns_the_loss() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(session)).square().mean()
            loss.backward()
            return loss.detach()

        return optimizer.step(closure).item(), [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    joint(model, 2).backward()
    optimizer.step()
    for loss, read in run(loop):
        assert loss > 0
        assert all(close(a, b) for a, b in zip(read, model.parameters(), strict=True))


def test_evaluation_in_inference_mode_leaves_training_intact() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        for step in range(3):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            optimizer.step()
            model.eval()
            with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
                model(batch(session, step).float().double())
            model.train()
        return [p.detach().clone() for p in model.parameters()]

    require_plain_result(loop)


def test_state_dict_is_that_of_the_plain_optimizer_and_resumes() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        saved: Any = None
        for step in range(4):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            optimizer.step()
            if step == 1:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        final = [p.detach().clone() for p in model.parameters()]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for step in (2, 3):
            optimizer.zero_grad()
            model(batch(session, step)).square().mean().backward()
            optimizer.step()
        return list(saved[0]), list(saved[1]), final, [p.detach().clone() for p in model.parameters()]

    model, optimizer = plain_model()
    for names, keys, final, resumed in run(loop):
        assert names == list(model.state_dict())
        assert keys == list(optimizer.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(final, resumed, strict=True))


def test_the_last_update_is_in_place_when_the_session_closes() -> None:
    seen: dict[int, Any] = {}

    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(batch(session)).square().mean().backward()
        optimizer.step()
        seen[session.rank] = model

    run(loop)
    model, optimizer = plain_model()
    joint(model, 2).backward()
    optimizer.step()
    for rank in range(2):
        assert all(type(p) is nn.Parameter for p in seen[rank].parameters())
        assert all(close(a, b) for a, b in zip(seen[rank].parameters(), model.parameters(), strict=True))


def test_one_rank_is_plain_torch() -> None:
    (session,) = local_sessions(1)
    model, plain = plain_model()
    optimizer = ScheduledOptimizer(plain, model, session=session)
    other, other_optimizer = plain_model()
    for step in range(3):
        for m, o in ((model, optimizer), (other, other_optimizer)):
            o.zero_grad()
            joint(m, 1, step).backward()
            o.step()
            assert all(type(p) is nn.Parameter for p in m.parameters())
    with optimizer.no_sync():
        pass
    optimizer.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    session.close()


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse": (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "module '0' makes sparse gradients"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "parameter '0.weight' has no shape yet"),
    "complex": (lambda: nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), "parameter '0' is torch.complex64"),
    "scripted": (lambda: _scripted(), "is a TorchScript module"),
    "compiled": (lambda: _compiled(), "is compiled"),
}


def _scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(2, 2)))


def _compiled() -> nn.Module:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler's own imports
        model.compile()
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_named_before_training(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(commsched.UnsupportedError, match=message):
        run(lambda *_: None, model=make)


def test_unsupported_optimizers_are_named_before_training() -> None:
    sessions = local_sessions(2)
    model = nn.Linear(2, 2)
    with pytest.raises(commsched.UnsupportedError, match="LBFGS is not supported: it runs backward several times"):
        ScheduledOptimizer(torch.optim.LBFGS(model.parameters()), model, session=sessions[0])
    for session in sessions:
        session.abort("the test is over")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank: nn.Linear(4, 2 + rank), r"'weight' float32\[2, 4\] on rank 0 but 'weight' float32\[3, 4\] on rank 1"),
        (
            lambda rank: nn.Linear(4, 2).to([torch.float32, torch.float64][rank]),
            "float32.* on rank 0 but .*float64.* on rank 1",
        ),
        (lambda rank: nn.Sequential(*[nn.Linear(4, 4)] * 1, *[nn.Linear(4, 4) for _ in range(rank)]), "rank 1 has 4"),
    ],
)
def test_different_models_are_named_before_any_data_moves(make: Callable[[int], nn.Module], message: str) -> None:
    def rank_loop(rank: int) -> None:
        with sessions[rank] as session:
            ScheduledOptimizer(torch.optim.SGD(models[rank].parameters(), lr=0.1), models[rank], session=session)

    models = [make(rank) for rank in range(2)]
    before = [[p.detach().clone() for p in model.parameters()] for model in models]
    sessions = local_sessions(2)
    with pytest.raises(commsched.ManifestMismatch, match=message):
        run_world(2, rank_loop, timeout_seconds=30)
    for model, weights in zip(models, before):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights))
    for session in sessions:
        session.abort("the test is over")


def test_a_parameter_unfrozen_later_is_an_error() -> None:
    def loop(session: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model[0].weight.requires_grad_(True)
        model(batch(session)).square().mean().backward()
        optimizer.step()

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).double()
        model[0].weight.requires_grad_(False)
        return model

    with pytest.raises(commsched.CommschedError, match=r"'0\.weight' has a gradient, but did not require one"):
        run(loop, model=make)


def test_layers_are_ordered_by_first_use_not_by_registration() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)))

    def loop(session: Session, model: nn.Module, optimizer: Any) -> list[str]:
        model(batch(session)).square().mean().backward()
        optimizer.step()
        return [spec.name for spec in optimizer._exchange.buffers.gradients.manifest.tensors]

    for names in run(loop, model=lambda: Backwards().double()):
        layers = [name.split(".")[0] for name in names]
        assert layers == ["first", "first", "middle", "middle", "last", "last"]
