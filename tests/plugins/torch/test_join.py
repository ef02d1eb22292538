"""Ranks with different numbers of batches, within a Join."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import ConfigError, SchedulerConfig, UnsupportedError
from commsched.plugins.torch import Join, announcements

from .loops.loop import LARGE, SMALL, TOLERANCE, Data, alone, batch, require_close, run

RANKS = 3
CONFIGS = pytest.mark.parametrize(("config", "ordered"), [(SMALL, False), (LARGE, True)], ids=["cut", "merged, ordered"])


class Uneven(Data):
    """The batches of an epoch: ``counts[rank]`` of each rank. Plain training adds up the gradients of those that are there."""

    counts: Sequence[int] = ()
    by_live = False

    def join(self, *optimizers: Any, **options: Any) -> AbstractContextManager[object]:
        if self._session is None:
            return nullcontext()
        return Join(optimizers, divide_by_initial_world_size=not self.by_live, **options)

    def steps(self) -> range:
        return range(max(self.counts[rank] for rank in self.ranks))

    def loss(self, model: Any, step: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        there = [rank for rank in self.ranks if step < self.counts[rank]]
        losses = torch.stack([model(batch(rank, step, dtype)).square().mean() for rank in there])
        alone = len(self.ranks) > 1
        return losses.sum() / (1 if not alone else len(there) if self.by_live else len(self.ranks))


def require_plain(loop: Any, counts: Sequence[int], *, by_live: bool = False, **options: Any) -> None:
    """As :func:`loops.loop.require_plain`, for ranks with different numbers of batches."""

    def with_counts(data: Data, model: Any, optimizer: Any) -> Any:
        uneven = Uneven(data.ranks, data._session)
        uneven.counts, uneven.by_live = counts, by_live
        returned = loop(uneven, model, optimizer)
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return {"returned": returned, "weights": weights, "optimizer": optimizer.state_dict()}

    expected = alone(with_counts, world_size=len(counts), **{k: v for k, v in options.items() if k in ("model", "optimizer")})
    results = run(with_counts, world_size=len(counts), **options)
    for rank, result in enumerate(results):
        require_close(result, expected, TOLERANCE, f"rank {rank} differs from plain training:")
        require_close(result["weights"], results[0]["weights"], 0.0, f"rank {rank} differs from rank 0:")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def two_epochs(data: Uneven, model: Any, optimizer: Any) -> None:
    for _ in range(2):
        with data.join(optimizer):
            for step in data.steps():
                optimizer.zero_grad()
                data.loss(model, step).backward()
                optimizer.step()


@CONFIGS
@pytest.mark.parametrize("counts", [(4, 2, 3), (0, 3, 1), (2, 2, 2), (0, 0, 0), (1, 4, 4)], ids=str)
def test_two_epochs(counts: Sequence[int], config: SchedulerConfig, ordered: bool) -> None:
    require_plain(two_epochs, counts, optimizer=adam, config=config, ordered=ordered)


@pytest.mark.parametrize("counts", [(4, 2, 3), (0, 3, 1), (0, 0, 0)], ids=str)
def test_two_epochs_divided_by_the_number_of_live_ranks(counts: Sequence[int]) -> None:
    """It divides what has come, however that was cut and ordered."""
    require_plain(two_epochs, counts, by_live=True, optimizer=adam, config=LARGE, ordered=True)


def _clipped(data: Uneven, model: Any, optimizer: Any, step: int) -> Any:
    data.loss(model, step).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return float(norm)


def _accumulated(data: Uneven, model: Any, optimizer: Any, step: int) -> None:
    """An average travels again with the next gradient; the last batches of a rank may be without ``step()``."""
    data.loss(model, step).backward()
    if step % 2 or step + 1 == 5:
        optimizer.step()
        optimizer.zero_grad()


def _dropped(data: Uneven, model: Any, optimizer: Any, step: int) -> None:
    """A skipped batch, as after an overflow; on some ranks it is the last."""
    optimizer.zero_grad()
    data.loss(model, step).backward()
    if step % 3 != 1:
        optimizer.step()


def _one_part_after_another(data: Uneven, model: Any, optimizer: Any, step: int) -> None:
    """Parameters without a gradient, and gradients that are zeros of another kind."""
    optimizer.zero_grad(set_to_none=step != 2)
    data.loss(model[:2] if step % 2 else model, step).backward()
    optimizer.step()


def _with_closure(data: Uneven, model: Any, optimizer: Any, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = data.loss(model, step)
        loss.backward()
        return loss

    optimizer.step(closure)


def _scheduled(data: Uneven, model: Any, optimizer: Any, step: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
    optimizer.zero_grad()
    data.loss(model, step).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("counts", "config", "ordered"), [((5, 2, 3), SMALL, False), ((2, 5, 5), LARGE, True), ((1, 5, 4), SMALL, False)], ids=str
)
@pytest.mark.parametrize("step", [_clipped, _accumulated, _dropped, _one_part_after_another, _with_closure, _scheduled])
def test_what_a_step_may_be(step: Any, counts: Sequence[int], config: SchedulerConfig, ordered: bool) -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            with data.join(optimizer):
                for number in data.steps():
                    if step is _clipped:
                        optimizer.zero_grad()
                    step(data, model, optimizer, number)
            optimizer.zero_grad()

    require_plain(loop, counts, config=config, ordered=ordered)


@pytest.mark.parametrize("counts", [(6, 3, 4), (3, 5, 5)], ids=str)
def test_sums_of_each_rank_travel_even_if_it_runs_out_of_batches_first(counts: Sequence[int]) -> None:
    """A rank's own sums, of passes within no_sync(), are in the next round of the others."""

    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            with data.join(optimizer):
                for step in data.steps():
                    last = step % 2 == 1
                    with nullcontext() if last else data.no_sync(optimizer):
                        data.loss(model, step).backward()
                    if last:
                        optimizer.step()
                        optimizer.zero_grad()
            optimizer.zero_grad()

    require_plain(loop, counts)


@CONFIGS
def test_a_rank_that_leaves_between_backward_and_step(config: SchedulerConfig, ordered: bool) -> None:
    """The others make the update with its gradient, and all compare the weights that they had before."""

    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        for _ in range(2):
            with data.join(optimizer):
                for step in data.steps():
                    optimizer.zero_grad()
                    data.loss(model, step).backward()
                    if data.ranks == [0] and step == 1:
                        break
                    optimizer.step()

    require_plain(loop, (2, 4), optimizer=adam, config=config, ordered=ordered)


@CONFIGS
@pytest.mark.parametrize("counts", [(4, 1, 2), (1, 3, 4), (0, 2, 3)], ids=str)
def test_several_optimizers(counts: Sequence[int], config: SchedulerConfig, ordered: bool) -> None:
    """One is stepped less often, and gets gradients from the loss of another: as the discriminator of a GAN."""

    def loop(data: Uneven, model: Any, optimizer: Any) -> Any:
        other = nn.Linear(2, 2).double()
        with torch.no_grad():
            for number, parameter in enumerate(other.parameters(), 1):
                parameter.fill_(0.1 * number)
        second = data.scheduled(torch.optim.AdamW(other.parameters(), lr=0.01), other)
        for _ in range(2):
            with data.join(optimizer, second):
                for step in data.steps():
                    if step % 2 == 0:
                        second.zero_grad()
                        data.loss(lambda inputs: other(model(inputs).detach()), step).backward()
                        second.step()
                    optimizer.zero_grad()
                    data.loss(lambda inputs: other(model(inputs)), step).backward()
                    optimizer.step()
        return other.state_dict(), second.state_dict()

    require_plain(loop, counts, config=config, ordered=ordered)


@CONFIGS
@pytest.mark.parametrize("counts", [(5, 1, 4), (1, 5, 3)], ids=str)
def test_parameters_unfrozen_while_a_rank_has_no_batches(counts: Sequence[int], config: SchedulerConfig, ordered: bool) -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        model[0].requires_grad_(False)
        for _ in range(2):
            with data.join(optimizer):
                for step in data.steps():
                    if step == 2:
                        model[0].requires_grad_(True)
                    optimizer.zero_grad()
                    data.loss(model, step).backward()
                    optimizer.step()
            model[0].requires_grad_(True)

    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
        model[0].requires_grad_(False)
        return model

    require_plain(loop, counts, model=frozen, config=config, ordered=ordered)


def run_counts(loop: Any, counts: Sequence[int], **options: Any) -> list[Any]:
    def with_counts(data: Data, model: Any, optimizer: Any) -> Any:
        uneven = Uneven(data.ranks, data._session)
        uneven.counts = counts
        return loop(uneven, model, optimizer)

    return run(with_counts, world_size=len(counts), **options)


def test_buffers_are_those_of_a_rank_that_made_all_updates_if_any_did_not() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()

    def loop(data: Uneven, model: Any, optimizer: Any) -> list[torch.Tensor]:
        means = []
        for data.counts in ((1, 3, 2), (2, 2, 2)):
            train_one_epoch(data, model, optimizer)
            means.append(model[1].running_mean.clone())
        return means

    uneven, even = zip(*run_counts(loop, (0, 0, 0), model=normed))
    assert torch.equal(uneven[0], uneven[1])
    assert torch.equal(uneven[0], uneven[2])
    assert not torch.equal(even[0], even[1])


def train_one_epoch(data: Uneven, model: Any, optimizer: Any, **options: Any) -> None:
    with data.join(optimizer, **options):
        for step in data.steps():
            optimizer.zero_grad()
            data.loss(model, step).backward()
            optimizer.step()


def test_the_context_of_one_optimizer() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> Any:
        with optimizer.join(divide_by_initial_world_size=False):
            for step in data.steps():
                optimizer.zero_grad()
                data.loss(model, step).backward()
                optimizer.step()
        return model[0].weight.detach()

    first, second = run_counts(loop, (1, 2))
    assert torch.equal(first, second)


def test_ranks_all_end_when_the_first_runs_out_of_batches_if_the_context_says_so() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> Any:
        with pytest.raises(RuntimeError, match="a rank has run out of batches, and throw_on_early_termination is set"):
            train_one_epoch(data, model, optimizer, throw_on_early_termination=True)
        steps = float(optimizer.state_dict()["state"][0]["step"])
        optimizer.zero_grad()
        train_one_epoch(data, model, optimizer)  # they may go on
        return steps, model[0].weight.detach()

    (steps, weight), *others = run_counts(loop, (4, 2, 3), optimizer=adam)
    assert steps == 2
    for other_steps, other in others:
        assert other_steps == 2
        assert torch.equal(weight, other)


def test_a_context_that_is_off_and_a_job_of_one_rank() -> None:
    run_counts(lambda data, model, optimizer: train_one_epoch(data, model, optimizer, enable=False), (2, 2))
    run_counts(train_one_epoch, (2,))
    with pytest.raises(commsched.PeerLost, match="rank 0"):
        run_counts(lambda data, model, optimizer: train_one_epoch(data, model, optimizer, enable=False), (1, 2))


def test_weights_are_compared_again_after_a_rank_ran_out_of_batches() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        for data.counts in ((1, 3), (3, 1), (4, 4)):
            train_one_epoch(data, model, optimizer)
        if data.ranks == [1]:
            with torch.no_grad():
                model[0].bias.add_(1.0)
        train_one_epoch(data, model, optimizer)

    with pytest.raises(commsched.RanksDiverged, match=r"weights differ between ranks after step 6: '0\.bias'"):
        run_counts(loop, (0, 0))


def test_schedulers_and_scalers_are_taken_over_if_they_are_named() -> None:
    """Else the learning rates of the next epoch would differ."""

    def loop(data: Uneven, model: Any, optimizer: Any) -> Any:
        schedulers = [
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5),
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for _ in range(2):
            with data.join(optimizer, **({} if data._session is None else {"states": [*schedulers, scaler]})):
                for step in data.steps():
                    optimizer.zero_grad()
                    scaler.scale(data.loss(model, step)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    for scheduler in schedulers:
                        scheduler.step()
        return scaler.get_scale(), [scheduler.last_epoch for scheduler in schedulers], schedulers[0].get_last_lr()

    require_plain(loop, (2, 4, 3), optimizer=adam)


def test_a_scheduler_that_is_not_named_is_noticed() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(2):
            with data.join(optimizer):
                for step in data.steps():
                    optimizer.zero_grad()
                    data.loss(model, step).backward()
                    optimizer.step()
                    scheduler.step()

    message = r"hyper-parameters differ between ranks after step 4: .*param_groups\[0\]\['lr'\]"
    with pytest.raises(commsched.RanksDiverged, match=message):
        run_counts(loop, (2, 3))


# --- mistakes and failures ---


class Broken(Exception):
    pass


@pytest.mark.parametrize("broken", [0, 1], ids=["with fewer batches", "with more"])
def test_an_exception_within_the_context_ends_the_job(broken: int) -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        with data.join(optimizer):
            for step in data.steps():
                optimizer.zero_grad()
                data.loss(model, step).backward()
                if data.ranks == [broken] and step == (0, 2)[broken]:
                    raise Broken("on purpose")
                optimizer.step()

    with pytest.raises((Broken, commsched.TransportError), match="on purpose"):
        run_counts(loop, (1, 4))


def test_an_exception_that_all_ranks_catch() -> None:
    """After different numbers of announced rounds."""

    def loop(data: Uneven, model: Any, optimizer: Any) -> torch.Tensor:
        for attempt in range(2):
            with suppress(Broken), data.join(optimizer):
                for step in data.steps():
                    optimizer.zero_grad()
                    if attempt == 0 and step == 1 and data.ranks == [0]:
                        raise Broken
                    data.loss(model, step).backward()
                    if attempt == 0 and step == 1:
                        raise Broken
                    optimizer.step()
            optimizer.zero_grad()
            if attempt == 0 and data.ranks == [0]:
                data.loss(model).backward()  # a batch to go with the one of the others
                optimizer.zero_grad()
        return model[0].weight.detach()

    first, second = run_counts(loop, (3, 2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("broken", [0, 1], ids=["with fewer batches", "with more"])
@pytest.mark.parametrize("then", ["another loop", "a Join"])
def test_an_exception_that_one_rank_catches_outside_ends_the_job(
    then: str, broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others learn of it: they would wait in the Join for a rank that is elsewhere."""
    monkeypatch.setattr(announcements.timeouts, "RAISE_SECONDS", 0.1)

    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        with suppress(Broken), data.join(optimizer):
            for step in data.steps():
                if data.ranks == [broken] and step == 2:
                    raise Broken
                optimizer.zero_grad()
                data.loss(model, step).backward()
                optimizer.step()
        with nullcontext() if then == "another loop" else data.join(optimizer):
            for step in data.steps():
                optimizer.zero_grad()
                data.loss(model, step).backward()
                optimizer.step()

    with pytest.raises((UnsupportedError, commsched.TransportError), match="another rank has left the Join by an exception"):
        run_counts(loop, (4, 5))


def test_an_exception_after_another_rank_ran_out_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements.timeouts, "RAISE_SECONDS", 0.1)

    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        with suppress(Broken), data.join(optimizer):
            for step in data.steps():
                if step == 3:
                    raise Broken
                optimizer.zero_grad()
                data.loss(model, step).backward()
                optimizer.step()
        data._session.gather(None)

    with pytest.raises((UnsupportedError, commsched.TransportError), match="another rank has left the Join by an exception"):
        run_counts(loop, (1, 5))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda model, optimizer: {"optimizers": [model]}, TypeError, r"a list of ScheduledOptimizers, .* not \[Sequential\]"),
        (lambda model, optimizer: {"optimizers": [adam(model)]}, TypeError, r"a list of ScheduledOptimizers, .* not \[AdamW\]"),
        (lambda model, optimizer: {"optimizers": optimizer}, TypeError, r"Join\(\[optimizer\]\), not a ScheduledOptimizer"),
        (lambda model, optimizer: {"optimizers": []}, ValueError, "at least one ScheduledOptimizer"),
        (lambda model, optimizer: {"optimizers": [optimizer], "states": adam(model)}, TypeError, "not a AdamW"),
        (lambda model, optimizer: {"optimizers": [optimizer], "states": [3]}, TypeError, r"load_state_dict\(\).* not \[int\]"),
    ],
)
def test_arguments_that_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        with pytest.raises(error, match=message), Join(**arguments(model, optimizer)):
            pass

    run_counts(loop, (1, 1))


def test_states_that_differ_between_ranks_are_refused() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        states = [model] if data.ranks == [0] else []
        message = r"states is \['Sequential'\] on rank 0 but \[\] on rank 1"
        with pytest.raises(ConfigError, match=message), data.join(optimizer, states=states):
            pass

    run_counts(loop, (1, 1))


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda data, model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            UnsupportedError,
            r"add_param_group\(\), within a Join",
        ),
        (
            lambda data, model, optimizer: optimizer.detach(),
            UnsupportedError,
            r"detach\(\), or another ScheduledOptimizer .* within a Join",
        ),
        (lambda data, model, optimizer: data.join(optimizer).__enter__(), ConfigError, "is in two Joins at once"),
    ],
)
def test_what_is_refused_within_the_context(act: Any, error: type[Exception], message: str) -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        with pytest.raises(error, match=message), data.join(optimizer):
            act(data, model, optimizer)

    run_counts(loop, (1, 1))


def test_an_optimizer_outside_of_the_context_is_refused() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        other = nn.Linear(4, 1).double()
        data.scheduled(torch.optim.SGD(other.parameters(), lr=0.1), other)
        with pytest.raises(UnsupportedError, match="not in the Join would wait for ranks"), data.join(optimizer):
            other(batch(0)).sum().backward()

    run_counts(loop, (1, 1))


def test_a_context_within_another_is_refused() -> None:
    """A rank that leaves the inner one would wait for ranks that wait for it in the other."""

    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        other = nn.Linear(2, 1).double()
        second = data.scheduled(torch.optim.SGD(other.parameters(), lr=0.1), other)

        def train() -> None:
            with data.join(optimizer), data.join(second):
                for step in data.steps():
                    data.loss(lambda inputs: other(model(inputs)), step).backward()
                    optimizer.step()
                    second.step()

        with pytest.raises(ConfigError, match="give one Join all optimizers"):
            train()
        with data.join(second):
            pass

    run_counts(loop, (1, 3))


def test_contexts_that_differ_between_ranks_are_refused() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        data.by_live = data.ranks == [1]
        message = "ranks enter a Join with other arguments: divide_by_initial_world_size is True on rank 0 but False on rank 1"
        with pytest.raises(ConfigError, match=message), data.join(optimizer):
            pass

    run_counts(loop, (1, 1))


def test_an_average_with_own_sums_is_refused_once_a_rank_has_no_batches() -> None:
    def loop(data: Uneven, model: Any, optimizer: Any) -> None:
        with data.join(optimizer):
            for step in data.steps():
                data.loss(model, step).backward()
                with data.no_sync(optimizer):
                    data.loss(model, step).backward()
                data.loss(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()

    run_counts(loop, (2, 2))
    with pytest.raises((UnsupportedError, commsched.TransportError), match="is an average plus gradients made within no_sync"):
        run_counts(loop, (1, 2))
