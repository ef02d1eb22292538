"""Parameters that the optimizer learns to train later: unfrozen after wrapping, or added by add_param_group()."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import SchedulerConfig
from commsched.core.group import TensorGroup

from .loops.loop import LARGE, SMALL, Data, batch, mlp, require_plain, run, sgd, train

CONFIGS = pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, True)], ids=["cut", "merged, ordered"])


def deep(frozen: int = 2) -> nn.Sequential:
    """Four layers, of which the first ``frozen`` are."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    model[:frozen].requires_grad_(False)
    return model


def adam(model: Any) -> torch.optim.Optimizer:
    """A group for each layer."""
    groups = [{"params": list(layer.parameters()), "lr": 0.01 / (1 + index)} for index, layer in enumerate(model)]
    return torch.optim.AdamW(groups, weight_decay=0.1)


def _step(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    data.loss(model, step).backward()
    optimizer.step()


def _clipped(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    """The norm is that of all gradients, in the first round of a parameter too."""
    data.loss(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def _accumulated(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    data.loss(model, step).backward()
    data.loss(model, step + 5).backward()
    optimizer.step()


def _local_first(data: Data, model: nn.Module, optimizer: Any, step: int) -> None:
    with data.no_sync(optimizer):
        data.loss(model, step).backward()
    data.loss(model, step + 5).backward()
    optimizer.step()


def _halved(data: Data, model: Any, optimizer: Any, step: int) -> None:
    data.loss(model, step).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5
    optimizer.step()


def _local_then_without_it(data: Data, model: Any, optimizer: Any, step: int) -> None:
    with data.no_sync(optimizer):
        data.loss(model, step).backward()
    data.loss(model[2:], step + 5).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def _by_itself_at_the_end(data: Data, model: Any, optimizer: Any, step: int) -> None:
    data.loss(model[2:], step).backward()
    if step > 1:
        data.loss(model[1], step + 5).backward()
    optimizer.step()


STEPS: dict[str, Callable[[Data, Any, Any, int], None]] = {
    "plain": _step,
    "clipped": _clipped,
    "accumulated": _accumulated,
    "local first": _local_first,
    "halved": _halved,
    "local, then without it": _local_then_without_it,
    "by itself at the end": _by_itself_at_the_end,
}


@CONFIGS
@pytest.mark.parametrize("name", STEPS)
def test_progressive_unfreezing(name: str, config: SchedulerConfig, ordered: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            if step in (1, 2):
                model[2 - step].requires_grad_(True)
            optimizer.zero_grad(set_to_none=step != 2)
            STEPS[name](data, model, optimizer, step)

    require_plain(loop, model=deep, optimizer=adam, config=config, ordered=ordered)


def test_frozen_again() -> None:
    """With its last gradient dropped a parameter rests, with a gradient left it is updated still, as in plain torch."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(6):
            model[1].requires_grad_(step in (1, 4))
            model[3].requires_grad_(step != 2)
            if step != 5:
                optimizer.zero_grad()
            _step(data, model, optimizer, step)

    require_plain(loop, model=deep, optimizer=adam)


def test_all_frozen_at_first() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        optimizer.step()
        model[2:].requires_grad_(True)
        train(data, model, optimizer)

    require_plain(loop, model=lambda: deep(frozen=4), optimizer=adam)


def test_between_two_backward_passes() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(2):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            model[1].requires_grad_(True)
            data.loss(model, step + 5).backward()
            optimizer.step()

    require_plain(loop, model=deep, optimizer=adam)


def test_an_added_parameter_that_has_a_gradient_already() -> None:
    """It was not frozen, so backward has made its gradient all along, and it comes first in backward."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        last = model[3]
        for step in range(5):
            model.zero_grad(set_to_none=False)
            data.loss(model, step).backward()
            if step == 2:
                optimizer.step()
                model.zero_grad(set_to_none=False)
                optimizer.add_param_group({"params": list(last.parameters()), "lr": 0.2})
                data.loss(model, step + 10).backward()
            optimizer.step()

    require_plain(loop, model=lambda: deep(0), optimizer=lambda model: torch.optim.SGD(model[:3].parameters(), lr=0.1))


def test_an_optimizer_that_is_called_once_per_step() -> None:
    class Own(torch.optim.SGD):
        pass

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            model[1].requires_grad_(step > 0)
            optimizer.zero_grad()
            _step(data, model, optimizer, step)

    require_plain(loop, model=deep, optimizer=lambda model: Own(model.parameters(), lr=0.1, weight_decay=0.1))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)
        self.sometimes.requires_grad_(False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        output: torch.Tensor = self.shared(x)
        return output + self.sometimes(x) if both else output


def one_sided(data: Data, model: nn.Module, step: int, rank_1_uses_it: bool) -> torch.Tensor:
    return data.mean(lambda rank: model(batch(rank, step), rank == 1 and rank_1_uses_it).square().mean())


@CONFIGS
def test_unfrozen_everywhere_but_used_by_one_rank(config: SchedulerConfig, ordered: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(4):
            model.sometimes.requires_grad_(step > 0)
            optimizer.zero_grad()
            one_sided(data, model, step, step > 1).backward()
            optimizer.step()

    require_plain(loop, model=lambda: Branches().double(), config=config, ordered=ordered)


def test_clipping_where_one_rank_uses_it() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        norms = []
        for step in range(3):
            model.sometimes.requires_grad_(step > 0)
            optimizer.zero_grad()
            one_sided(data, model, step, step > 0).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
        return norms

    require_plain(loop, model=lambda: Branches().double())


@pytest.mark.parametrize("ordered", [False, True])
def test_one_rank_reads_before_and_after_step_while_others_wait_for_it(ordered: bool) -> None:
    """A place in a buffer needs all ranks: none may find another at a barrier of the user's."""
    barrier = threading.Barrier(2)

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            model[1].requires_grad_(step > 0)
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if data.ranks[0] == 0:
                assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            optimizer.step()
            if data.ranks[0] == 0:
                copy.deepcopy(model.state_dict())
            if len(data.ranks) == 1:
                barrier.wait(60)

    require_plain(loop, model=deep, optimizer=adam, ordered=ordered)


def test_one_rank_reads_averages_while_another_waits_before_step_with_a_frozen_parameter() -> None:
    """All that a rank has to send leaves within backward, also if a parameter without a place stays frozen."""
    barrier = threading.Barrier(2)

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        model[1].requires_grad_(False)
        for step in range(2):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            if data.ranks[0] == 0:
                assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            if len(data.ranks) == 1:
                barrier.wait(60)
            optimizer.step()

    require_plain(loop, model=deep, optimizer=adam)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_unfrozen_on_one_rank_only_is_an_error(rank: int, reads: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        model[1].requires_grad_(rank in data.ranks)
        data.loss(model).backward()
        if reads:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"requires one now, or has one, on some ranks only.*unfreeze it on all"):
        run(loop, model=deep, optimizer=adam)


def test_what_is_frozen_must_be_the_same() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        extra = nn.Linear(4, 3 + data.ranks[0]).double().requires_grad_(False)
        data.scheduled(torch.optim.SGD([*nn.Linear(4, 2).double().parameters(), *extra.parameters()]), extra)

    with pytest.raises(
        commsched.ManifestMismatch, match=r"\['weight', \[3, 4\], 'torch.float64', False\] on rank 0 but \['weight'"
    ):
        run(loop, model=deep, optimizer=adam)


def test_a_gradient_that_appears_after_others_were_read_is_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.loss(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"'0\.weight'\.grad was set after backward, or after other"):
        run(loop, model=deep, optimizer=adam)


def head(data: Data, seed: int = 0) -> nn.Linear:
    """A fresh one; each rank has its own, of which rank 0's counts."""
    generator = torch.Generator().manual_seed(seed + 10 * data.ranks[0])
    fresh = nn.Linear(4, 4).double()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return fresh


@CONFIGS
@pytest.mark.parametrize("when", ["before the first step", "after a step", "between backward and step"])
def test_a_fresh_head(when: str, config: SchedulerConfig, ordered: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        if when != "before the first step":
            train(data, model, optimizer, 2)
        if when == "between backward and step":
            optimizer.zero_grad()
            data.loss(model, 5).backward()
        model.append(head(data))
        optimizer.add_param_group({"params": model[-1].parameters(), "lr": 0.05, "weight_decay": 0.2})
        if when == "between backward and step":
            optimizer.step()
        train(data, model, optimizer, 2, first=2)
        model[0].requires_grad_(True)
        model.append(head(data, 1))
        optimizer.add_param_group({"params": model[-1].parameters()})
        train(data, model, optimizer, 2, first=4)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(data, model, optimizer, 2, first=6)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(data, model, optimizer, 1, first=6)

    require_plain(loop, model=deep, optimizer=adam, config=config, ordered=ordered)


def test_an_added_group_replaces_the_flags_of_fewer_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups of the old ones are released, not kept until the end."""
    here = threading.local()

    def release(group: TensorGroup, release: Callable[[TensorGroup], None] = TensorGroup.release) -> None:
        here.released = [*getattr(here, "released", []), group.manifest.tensors[0].name]
        release(group)

    def loop(data: Data, model: Any, optimizer: Any) -> list[str]:
        train(data, model, optimizer, 1)
        monkeypatch.setattr(TensorGroup, "release", release)
        model.append(head(data))
        optimizer.add_param_group({"params": model[-1].parameters()})
        train(data, model, optimizer, 1)
        return [name for name in here.released if name.startswith("commsched.")]  # others are of broadcasts

    assert run(loop, model=deep) == [["commsched.used", "commsched.kept"]] * 2


def test_an_added_group_that_is_frozen() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        model.append(head(data).requires_grad_(False))
        optimizer.add_param_group({"params": model[-1].parameters()})
        train(data, model, optimizer, 1, first=1)
        model[-1].requires_grad_(True)
        train(data, model, optimizer, 2, first=2)

    require_plain(loop, model=deep, optimizer=adam)


@pytest.mark.parametrize(
    ("shapes", "rates", "message"),
    [
        ((4, 5), (0.1, 0.1), r"has parameter \['4\.weight', \[4, 4\].*on rank 0 but \['4\.weight', \[5, 4\]"),
        ((4, 4), (0.1, 0.2), r"param_groups\[4\]\['lr'\] is 0\.1 on rank 0 but 0\.2 on rank 1"),
    ],
)
def test_added_groups_must_be_the_same(shapes: tuple[int, int], rates: tuple[float, float], message: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        (rank,) = data.ranks
        model.append(nn.Linear(4, shapes[rank]).double())
        optimizer.add_param_group({"params": model[-1].parameters(), "lr": rates[rank]})

    with pytest.raises(commsched.ManifestMismatch, match=message):
        run(loop, model=deep, optimizer=adam)


@pytest.mark.parametrize(("shapes", "rates"), [((4, 5), (0.1, 0.1)), ((4, 4), (0.1, 0.2))], ids=["shapes", "rates"])
def test_training_may_go_on_without_an_added_group_that_differs(shapes: tuple[int, int], rates: tuple[float, float]) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        if len(data.ranks) == 1:
            (rank,) = data.ranks
            differs = {"params": nn.Linear(4, shapes[rank]).double().parameters(), "lr": rates[rank]}
            with pytest.raises(commsched.ManifestMismatch):
                optimizer.add_param_group(differs)
        train(data, model, optimizer, 2, first=1)
        model.append(head(data))
        optimizer.add_param_group({"params": model[-1].parameters()})
        train(data, model, optimizer, 2, first=3)

    require_plain(loop, model=deep, optimizer=adam)


def test_an_added_group_may_have_a_name_of_each_ranks_own() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": head(data).parameters(), "name": f"head of {data.ranks}"})
        train(data, model, optimizer)
        optimizer.synchronize()

    run(loop, model=deep, optimizer=adam)


class Own(torch.optim.SGD):
    """Its update may depend on any entry of its groups."""


@pytest.mark.parametrize(
    ("modes", "text"), [(("a", "b"), "is a on rank 0 but b"), ((None, ...), "is None on rank 0 but not set")]
)
def test_an_added_group_has_the_same_entries_if_the_update_may_depend_on_them(modes: tuple[Any, Any], text: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        mode = modes[data.ranks[0]]
        options = {} if mode is ... else {"mode": mode}
        optimizer.add_param_group({"params": head(data).parameters(), **options})

    with pytest.raises(commsched.ManifestMismatch, match=rf"\['mode'\] {text} on rank 1"):
        run(loop, model=deep, optimizer=lambda model: Own(model.parameters(), lr=0.1))


def test_an_added_group_may_differ_later_in_no_entry_that_the_update_may_depend_on() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": head(data).parameters(), "mode": None})
        train(data, model, optimizer, steps=1)
        optimizer.param_groups[1]["mode"] = f"mode {data.ranks[0]}"
        train(data, model, optimizer, steps=1)
        optimizer.synchronize()

    with pytest.raises(commsched.RanksDiverged, match=r"\[1\]\['mode'\]' is \"mode 0\" on rank 0 but \"mode 1\" on rank 1"):
        run(loop, model=deep, optimizer=lambda model: Own(model.parameters(), lr=0.1))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_added_on_one_rank_only_is_refused(rank: int, clips: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        train(data, model, optimizer, 1)
        if rank in data.ranks:
            optimizer.add_param_group({"params": head(data).parameters()})
        data.loss(model, 1).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"some ranks called add_param_group\(\) while others trained on"):
        run(loop, model=deep, optimizer=adam)


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_gradient_of_one_rank_is_kept_over_step_and_an_added_group(zeroed: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.mean(lambda rank: model[2 + rank](batch(rank)).square().mean()).backward()
        optimizer.step()
        model.append(head(data))
        optimizer.add_param_group({"params": model[-1].parameters()})
        if zeroed:
            optimizer.zero_grad()
        train_without_zeroing(data, model, optimizer)

    if zeroed:
        require_plain(loop, model=deep, optimizer=adam)
    else:
        with pytest.raises(commsched.CommschedError, match=r"was kept over step\(\), but other ranks had none"):
            run(loop, model=deep, optimizer=adam)


def train_without_zeroing(data: Data, model: nn.Module, optimizer: Any) -> None:
    for step in range(1, 3):
        _step(data, model, optimizer, step)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_group_added_where_ranks_are_in_different_rounds_is_refused(ordered: bool) -> None:
    """The second backward begins a round only where it comes to something again."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.loss(model[2 if 0 in data.ranks else 3], 0).backward()
        data.loss(model[2], 1).backward()
        model.append(head(data))
        optimizer.add_param_group({"params": model[-1].parameters()})

    with pytest.raises(commsched.CommschedError, match=r"some ranks called add_param_group\(\) while others trained on"):
        run(loop, model=deep, optimizer=adam, ordered=ordered)


def test_a_group_added_past_us_is_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        optimizer.optimizer.add_param_group({"params": head(data).parameters()})
        train(data, model, optimizer)

    with pytest.raises(commsched.CommschedError, match=r"add them by add_param_group\(\) of the ScheduledOptimizer"):
        run(loop, model=deep, optimizer=adam)


def test_a_parameter_of_another_optimizer_is_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        other = mlp()
        theirs = data.scheduled(sgd(other), other)
        train(data, other, theirs, 1)
        optimizer.add_param_group({"params": list(other.parameters())[:1]})
        train(data, nn.Sequential(*model, other), optimizer, 1)

    with pytest.raises(commsched.CommschedError, match="belongs to another ScheduledOptimizer"):
        run(loop, model=deep, optimizer=adam)


def test_what_can_never_train_stays_frozen() -> None:
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(8, dtype=torch.int8).view(4, 2), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(2, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.codes * self.scale)

    require_plain(lambda data, model, optimizer: train(data, model, optimizer), model=Quantized)


def test_detached_within_a_round() -> None:
    """Gradients that no step has used are averages then."""

    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        model[1].requires_grad_(True)
        train(data, model, optimizer, 1)
        data.loss(model, 1).backward()
        if len(data.ranks) == 1:
            optimizer.detach()
        assert all(type(p) is nn.Parameter for p in model.parameters())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    require_plain(loop, model=deep, optimizer=adam)
