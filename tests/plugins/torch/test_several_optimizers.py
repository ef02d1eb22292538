"""Several optimizers, of parts of one model and of several models."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import SchedulerConfig

from .loops.loop import LARGE, SMALL, Data, batch, mlp, require_plain, run, sgd, train

CONFIGS = pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, True)], ids=["cut", "merged, ordered"])


@CONFIGS
def test_two_optimizers_of_one_model(config: SchedulerConfig, ordered: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        second = data.scheduled(torch.optim.AdamW(model[2].parameters(), lr=0.01), model)
        for step in range(4):
            optimizer.zero_grad()
            second.zero_grad()
            data.loss(model, step).backward()
            if step % 2:  # one more often than the other, and not in the order of the layers
                second.step()
            optimizer.step()
        return second.state_dict()

    require_plain(loop, optimizer=lambda model: sgd(model[0]), config=config, ordered=ordered)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_trials_that_begin_with_the_state_of_one_checkpoint(wrapped_first: bool, dropped: bool) -> None:
    """torch keeps the tensors that load_state_dict() is given: the first trial's last updates would come in the second. Plain
    trials are given copies."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        train(data, model, optimizer, 2)
        checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        trials = []
        for rate in (0.01, 0.001):
            another = mlp()
            another.load_state_dict(checkpoint["model"])
            its_own: Any = torch.optim.Adam(another.parameters(), lr=rate)
            if wrapped_first:
                its_own = data.scheduled(its_own, another)
            its_own.load_state_dict(checkpoint["optimizer"] if len(data.ranks) == 1 else copy.deepcopy(checkpoint["optimizer"]))
            if not wrapped_first:
                its_own = data.scheduled(its_own, another)
            train(data, another, its_own)
            trials.append(another)
            if rate == 0.01 and dropped:  # an exchange that is gone completes nothing
                trials = [copy.deepcopy(another)]
                del another, its_own
                gc.collect()
        return [parameter.detach().clone() for each in trials for parameter in each.parameters()]

    require_plain(loop, optimizer=adam)


def test_a_state_that_is_loaded_while_its_owner_has_outstanding_updates() -> None:
    """How many of them are made differs between ranks, until somebody waits."""
    together = threading.Barrier(2, timeout=60)

    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        train(data, model, optimizer, 2)
        state = optimizer.state_dict()  # no copy: it has the optimizer's own tensors
        another = mlp()
        its_own = data.scheduled(adam(another), another)
        train(data, model, optimizer, 1, 2)
        if data.ranks == [0]:
            optimizer.synchronize()
        together.wait()
        its_own.load_state_dict(state)
        together.wait()
        return [each["exp_avg"].clone() for each in its_own.state.values()]

    first, second = run(loop, optimizer=adam)
    assert all(torch.equal(*both) for both in zip(first, second))


class Own(torch.optim.SGD):
    """Called once per step, which waits."""


@pytest.mark.parametrize("first", [0, 2])
def test_one_rank_reads_gradients_while_another_waits_in_the_step_of_another_optimizer(first: int) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        second = data.scheduled(torch.optim.AdamW(model[2].parameters(), lr=0.01), model)
        for step in range(3):
            optimizer.zero_grad()
            second.zero_grad()
            data.loss(model, step).backward()
            if 0 in data.ranks:
                assert all(model[layer].weight.grad.isfinite().all() for layer in (first, 2 - first))
            nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
            optimizer.step()
            second.step()

    require_plain(loop, optimizer=lambda model: Own(model[0].parameters(), lr=0.1))


def test_clipping_with_gradients_that_nobody_averages_is_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(2):
            model.zero_grad()
            data.loss(model, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()

    with pytest.raises(commsched.CommschedError, match=r"was changed before step.* '2\.weight' is in no ScheduledOptimizer"):
        run(loop, optimizer=lambda model: sgd(model[0]))


def test_clipping_one_optimizer_s_parameters_while_others_have_gradients() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            model.zero_grad()
            data.loss(model, step).backward()
            nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)
            optimizer.step()

    require_plain(loop, optimizer=lambda model: sgd(model[0]))


def test_a_second_optimizer_spoils_no_order_of_layers() -> None:
    """Both are wrapped before the first forward, which the first registers last."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        second = data.scheduled(torch.optim.SGD(model.seen_first.parameters(), lr=0.1), model)
        for step in range(2):
            optimizer.zero_grad()
            second.zero_grad()
            data.loss(lambda x: model.last(model.first(model.seen_first(x))), step).backward()
            optimizer.step()
            second.step()
        if len(data.ranks) == 1:
            names = [spec.name for spec in optimizer._exchange.places.manifests[0].tensors]
            assert [name.split(".")[0] for name in names] == ["first", "first", "last", "last"]

    def model() -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("last", "first", "seen_first")}).double()

    require_plain(
        loop,
        model=lambda: _Attributes(model()),
        optimizer=lambda m: torch.optim.SGD([*m.last.parameters(), *m.first.parameters()]),
    )


class _Attributes(nn.Module):
    def __init__(self, modules: Any) -> None:
        super().__init__()
        self.last, self.first, self.seen_first = modules["last"], modules["first"], modules["seen_first"]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def noise(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + 10 * rank + step)
    return torch.randn(5, 3, generator=generator, dtype=torch.float64)


def _loss(output: torch.Tensor, label: float) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output, torch.full_like(output, label))


def real(data: Data, model: Any, step: int) -> torch.Tensor:
    return data.mean(lambda rank: _loss(model.discriminator(batch(rank, step)), 1.0))


def fake(data: Data, model: Any, step: int, label: float, detached: bool = False) -> torch.Tensor:
    def of_rank(rank: int) -> torch.Tensor:
        made = model.generator(noise(rank, step))
        return _loss(model.discriminator(made.detach() if detached else made), label)

    return data.mean(of_rank)


@pytest.mark.parametrize("local", [False, True], ids=["as written", "with no_sync"])
@CONFIGS
def test_gan(config: SchedulerConfig, ordered: bool, local: bool) -> None:
    """The loop of pytorch/examples' dcgan: the discriminator's gradients of the generator's loss are made, and dropped."""

    def loop(data: Data, model: Any, optimizer_d: Any) -> Any:
        netd, netg = model.discriminator, model.generator
        optimizer_g = data.scheduled(torch.optim.Adam(netg.parameters(), lr=0.02, betas=(0.5, 0.999)), netg)
        errors = []
        for step in range(3):
            netd.zero_grad()
            err_real = real(data, model, step)
            err_real.backward()
            err_fake = fake(data, model, step, 0.0, detached=True)
            err_fake.backward()
            optimizer_d.step()
            netg.zero_grad()
            err_g = fake(data, model, step, 1.0)
            with data.no_sync(optimizer_d) if local else nullcontext():
                err_g.backward()
            optimizer_g.step()
            errors.append(all(error.isfinite() for error in (err_real, err_fake, err_g)))
        return errors, optimizer_g.state_dict()

    require_plain(
        loop,
        model=lambda: Gan().double(),
        optimizer=lambda model: torch.optim.Adam(model.discriminator.parameters(), lr=0.02, betas=(0.5, 0.999)),
        config=config,
        ordered=ordered,
    )


def test_one_optimizer_of_both_parts_drops_one_part_s_gradients() -> None:
    """What is kept counts in the next round, what was dropped does not."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            fake(data, model, step, 1.0).backward()
            model.discriminator.zero_grad()
            real(data, model, step).backward()
            optimizer.step()

    require_plain(loop, model=lambda: Gan().double())


def test_a_rank_that_does_not_use_all_of_a_model_with_two_optimizers_in_its_first_backward_is_told_so() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        data.scheduled(torch.optim.SGD(model[2].parameters(), lr=0.1), model)
        hidden = model[0](batch(0))
        (model[2](hidden) if data.ranks == [0] else hidden).sum().backward()

    wrong = r"ScheduledOptimizer 2 on rank 0 but 1 on rank 1: .* use all its parameters in the first backward on every rank"
    with pytest.raises(commsched.ConfigError, match=wrong):
        run(loop, optimizer=lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_first_gradients_of_several_models_in_another_order_on_another_rank_are_refused() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        other = copy.deepcopy(model)
        both = [(model, optimizer), (other, data.scheduled(sgd(other), other))]
        for its_model, its_optimizer in both if data.ranks == [0] else both[::-1]:  # as threads may do it
            data.loss(its_model).backward()
            its_optimizer.step()

    wrong = r"first gradients are those of ScheduledOptimizer 1 on rank 0 but 2 on rank 1: .*in the same order on all ranks"
    with pytest.raises(commsched.ConfigError, match=wrong):
        run(loop)


def test_a_thread_for_each_model() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        other = copy.deepcopy(model)
        both = [(model, optimizer), (other, data.scheduled(sgd(other), other))]
        for its_model, its_optimizer in both:
            train(data, its_model, its_optimizer, 1)
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(train, data, *each, 6, 1 + index) for index, each in enumerate(both)]:
                done.result()
        return other.state_dict()

    require_plain(loop)
