"""Parameters that are frozen, not used, or used by some ranks in some steps."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import SchedulerConfig

from ..where import here
from .loop import LARGE, SMALL, Data, batch, require_close, require_plain, run, train


class Branches(nn.Module):
    """Parameters that a forward may leave out, and one that every forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.sometimes, self.never = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.shared(x) + self.sometimes(x) if both else self.shared(x)


def branches() -> nn.Module:
    return Branches().double()


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


#: Whether a rank uses the branch in a step.
USES: dict[str, Callable[[int, int], bool]] = {
    "one rank": lambda rank, step: rank == 1,
    "the other rank": lambda rank, step: rank == 0,
    "ranks in turn": lambda rank, step: (rank + step) % 2 == 0,
    "some steps": lambda rank, step: step % 2 == 1,
    "first step only": lambda rank, step: step == 0,
    "last step only, on one rank": lambda rank, step: step == 3 and rank == 0,
    "never": lambda rank, step: False,
}


@pytest.mark.parametrize("zero", ["none", "zeros"])
@pytest.mark.parametrize("name", USES)
def test_branches(name: str, zero: str) -> None:
    """The average counts a rank without gradient as zero; a parameter that nobody used is left alone, decay included."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad(set_to_none=zero == "none")
            data.mean(lambda rank, step=step: model(batch(rank, step), USES[name](rank, step)).square().mean()).backward()
            optimizer.step()

    config = LARGE if zero == "zeros" else SMALL  # with all tensors in one partition, and in many
    require_plain(loop, model=branches, optimizer=decaying, config=config)


@pytest.mark.parametrize("both", [True, False])
def test_clipping_with_parameters_that_are_not_used(both: bool) -> None:
    """All tensors share one partition, which does not become ready by backward alone."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        data.mean(lambda rank: model(batch(rank), both).square().mean()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return norm

    require_plain(loop, model=branches, config=LARGE)


class Experts(nn.Module):
    """Mixture of experts: each row goes to one expert. Between them a layer that some steps leave out, and one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(4))
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, experts: tuple[int, ...]) -> torch.Tensor:
        return self.head(self.gate(x) + sum(self.experts[each](x) for each in experts))


def experts() -> nn.Module:
    return Experts().double()


def of_rank(rank: int, step: int) -> tuple[int, ...]:
    return ((rank + step) % 3, (rank + step + 1) % 3) if step != 2 else (0,)


def experts_loss(data: Data, model: Any, step: int, scale: Callable[[int], float] = lambda rank: 1.0) -> torch.Tensor:
    return data.mean(lambda rank: model(batch(rank, step), of_rank(rank, step)).square().mean() * scale(rank))


def by_norm(model: nn.Module) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def by_norm_after_a_value_was_read(model: Any) -> torch.Tensor:
    model.head.weight.grad.norm().item()
    model.experts[1][0].weight.norm().item()
    return by_norm(model)


def by_norm_without_some(model: Any) -> torch.Tensor:
    """All ranks drop what only some of them had."""
    for parameter in model.experts[1].parameters():
        parameter.grad = None
    del model.experts[2][0].weight.grad
    assert model.experts[1][0].weight.grad is None
    return by_norm(model)


READS: dict[str, Callable[[Any], Any]] = {
    "drop some": by_norm_without_some,
    "clip by norm": by_norm,
    "clip by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.001),
    "clip after values": by_norm_after_a_value_was_read,
    "clip experts": lambda model: by_norm(model.experts),
    "log": lambda model: {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None},
    "which": lambda model: [p.grad is None for p in model.parameters()],
    "edit": lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None] and None,
    "replace": lambda model: [setattr(p, "grad", p.grad * 0.5) for p in model.parameters() if p.grad is not None] and None,
}


@pytest.mark.parametrize(
    ("name", "config", "ordered"),
    [*((name, SMALL, False) for name in READS), ("clip by norm", LARGE, False), ("clip by norm", SMALL, True)],
)
def test_gradients_are_read_where_each_rank_uses_other_experts(name: str, config: SchedulerConfig, ordered: bool) -> None:
    """What only other ranks have a gradient of has the average, and what nobody has stays None."""

    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            experts_loss(data, model, step).backward()
            seen.append(READS[name](model))
            optimizer.step()
        return seen

    require_plain(loop, model=experts, optimizer=decaying, config=config, ordered=ordered)


@pytest.mark.parametrize("clip", [False, True])
def test_an_overflow_in_the_expert_of_one_rank_is_found_by_all(clip: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            spoilt = float("inf") if step == 1 else 1.0
            loss = experts_loss(data, model, step)
            if data.ranks[-1] == 1:  # through its own expert alone
                loss = loss + (model.experts[(1 + step + 1) % 3](batch(1, step)).square().mean() * spoilt) / len(data.ranks)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                by_norm(model)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 512.0, 512.0, 1024.0]
        return scales

    require_plain(loop, model=experts, optimizer=decaying)


@pytest.mark.parametrize("zero", ["optimizer", "optimizer in place", "model"])
def test_a_step_with_other_experts_that_all_ranks_drop(zero: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            experts_loss(data, model, step).backward()
            if step == 1:
                (model if zero == "model" else optimizer).zero_grad(set_to_none=zero != "optimizer in place")
                continue
            by_norm(model)
            optimizer.step()
            optimizer.zero_grad()

    require_plain(loop, model=experts, optimizer=decaying)


def test_several_passes_through_other_experts_before_their_gradients_are_read() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            with data.no_sync(optimizer):
                experts_loss(data, model, step + 3).backward()
            experts_loss(data, model, step).backward()
            by_norm(model)
            optimizer.step()

    require_plain(loop, model=experts, optimizer=decaying)


def test_layers_that_some_ranks_unfroze_and_did_not_use_are_clipped() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            if step == 1:
                model.experts.requires_grad_(True)
            experts_loss(data, model, step).backward()
            by_norm(model)
            optimizer.step()

    def frozen() -> nn.Module:
        model = experts()
        model.experts.requires_grad_(False)  # type: ignore[union-attr]
        return model

    require_plain(loop, model=frozen, optimizer=decaying)


def test_objects_are_themselves_while_it_is_not_known_which_gradients_there_are() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        experts_loss(data, model, 0).backward()
        left = model.unused.weight
        copied, pickled, made = copy.deepcopy(left), pickle.loads(pickle.dumps(left)), type(left)(left.detach())
        for each in (copied, pickled, made):
            assert type(each) is nn.Parameter
            assert torch.equal(each, left)
        assert isinstance(left, nn.Parameter)
        with pytest.raises(AttributeError):
            left.grad.norm()
        assert type(left) is nn.Parameter
        left.grad = torch.ones_like(left)
        by_norm(model)
        optimizer.step()
        del left.grad
        return left.grad

    require_plain(loop, model=experts, optimizer=decaying)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("next_pass", ["branch", "other", "local"])
def test_a_gradient_of_one_rank_that_is_kept_over_step_is_refused(next_pass: str, clips: bool) -> None:
    """Those that had none would have to keep the average."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.mean(lambda rank: model(batch(rank), rank == 1).square().mean()).backward()
        optimizer.step()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with data.no_sync(optimizer) if next_pass == "local" else nullcontext():
            data.mean(lambda rank: model(batch(rank, 1), next_pass != "other").square().mean()).backward()
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"of 'sometimes\.\w+' was kept over step\(\), but other ranks had none"):
        run(loop, model=branches)


@pytest.mark.parametrize("local_passes", [0, 1, 2])
def test_a_gradient_of_one_rank_that_is_zeroed_in_place(local_passes: int) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        data.mean(lambda rank: model(batch(rank), rank == 1).square().mean()).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        for step in range(local_passes):
            with data.no_sync(optimizer):
                data.loss(partial(model, both=True), step + 5).backward()
        data.loss(partial(model, both=True), 1).backward()
        optimizer.step()

    require_plain(loop, model=branches)


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_that_all_ranks_keep_over_step_add_up(clips: bool) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(4):
            data.loss(partial(model, both=step != 2), step).backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    require_plain(loop, model=branches)


@pytest.mark.parametrize("given", [True, False], ids=["in the optimizer", "not in the optimizer"])
def test_frozen_parameters(given: bool) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        model[0].requires_grad_(False)
        return model

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return decaying(model) if given else decaying(model[2])  # type: ignore[index]

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop, model=make, optimizer=optimizer_of)


def test_parameters_of_the_model_that_no_optimizer_has_keep_their_own_gradients() -> None:
    """As without commsched: nobody averages them, nobody updates them."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        for step in range(3):
            optimizer.zero_grad()
            model[0].zero_grad()
            data.loss(model, step).backward()
            optimizer.step()
        return model[0].weight.grad.clone() if len(data.ranks) == 1 else None

    def loop_and_forget(data: Data, model: Any, optimizer: Any) -> None:
        loop(data, model, optimizer)

    require_plain(loop_and_forget, optimizer=lambda model: decaying(model[2]))
    first, second = run(loop, optimizer=lambda model: decaying(model[2]))
    assert not torch.equal(first, second)


def test_a_parameter_frozen_later_is_left_alone() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                model[0].requires_grad_(False)
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop, optimizer=decaying)


def test_a_parameter_frozen_between_forward_and_backward() -> None:
    """Backward comes to it and adds nothing."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(5):
            optimizer.zero_grad()
            loss = data.loss(model, step)
            model[0].requires_grad_(step % 2 == 0)
            loss.backward()
            model[0].requires_grad_(True)
            optimizer.step()

    require_plain(loop, optimizer=decaying)


def test_layers_taken_in_turn() -> None:
    """Of one model, another half is trained in each step: requires_grad is turned off and on again."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            for index in (0, 2):
                model[index].requires_grad_(step % 2 == index // 2)
            optimizer.zero_grad()
            data.loss(model, step).backward()
            optimizer.step()

    require_plain(loop, optimizer=decaying)


def test_a_model_all_of_which_is_unused_by_one_rank() -> None:
    """Its loss has no graph to the model: backward leaves no gradient at all."""

    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        beside = here(torch.zeros((), dtype=torch.float64)).requires_grad_()
        for step in range(3):
            optimizer.zero_grad()
            data.mean(lambda rank, step=step: beside * 1 if rank == 0 else model(batch(rank, step)).square().mean()).backward()
            optimizer.step()

    require_plain(loop, optimizer=decaying)


def test_layers_are_ordered_by_first_use_not_by_registration() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x)))

    def loop(data: Data, model: nn.Module, optimizer: Any) -> list[str]:
        data.loss(model).backward()
        optimizer.step()
        return [spec.name for spec in optimizer._exchange.places.manifests[0].tensors]

    for names in run(loop, model=lambda: Backwards().double()):
        layers = [name.split(".")[0] for name in names]
        assert layers == ["first", "first", "middle", "middle", "last", "last"]


def test_parameters_beside_the_model() -> None:
    """The optimizer has one that the model lacks; it begins as rank 0's."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 2).double()
            first = 3.0 if next(made) < 2 else 5.0  # plain training, rank 0, rank 1
            self.beside = [nn.Parameter(here(torch.full((2,), first, dtype=torch.float64)))]  # in a list: not registered

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.beside[0]

    def make_optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*model.parameters(), *model.beside], lr=0.1)

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        train(data, model, optimizer)
        return model.beside[0].detach().clone()

    made = itertools.count()
    require_plain(loop, model=Scale, optimizer=make_optimizer)


def test_ranks_hold_the_same_gradient_after_step_where_both_had_one() -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> Any:
        data.loss(model).backward()
        optimizer.step()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    require_plain(loop)
    first, second = run(loop)
    require_close(first, second, 0.0)
