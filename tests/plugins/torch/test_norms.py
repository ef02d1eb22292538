"""Norms of gradients whose averages are on the way: whoever needs one waits for the norm, and not for the averages."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched.plugins.torch.deferred import Deferred
from commsched.plugins.torch.norms import RoundNorms

from .loops.loop import Data, batch, mlp, require_plain, run, sgd
from .loops.test_overlap import LATE, PATIENCE_SECONDS, Held, networked

STEPS = 7  # in the first two, norms are not measured yet


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def clip(order: float = 2.0, foreach: bool | None = None) -> Callable[[Any], torch.Tensor]:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=order, foreach=foreach)


def _parted(model: Any) -> list[torch.Tensor]:
    norm = nn.utils.get_total_norm(gradients(model))
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
    return [norm, norm * 2 + 1, torch.stack([norm, norm]).mean()]


def _in_groups(model: Any) -> list[torch.Tensor]:
    return [nn.utils.clip_grad_norm_(layer.parameters(), 0.02) for layer in (model[0], model[2])]


def _twice(model: Any) -> list[torch.Tensor]:
    return [clip()(model), clip()(model), clip(math.inf)(model)]


def _by_value_first(model: Any) -> torch.Tensor:
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    return clip()(model)


def _by_hand(model: Any) -> torch.Tensor:
    norm = torch.stack([gradient.norm() for gradient in gradients(model)]).norm()
    for gradient in gradients(model):
        gradient.mul_(0.01 / norm)
    return norm


CLIPPING: dict[str, Callable[[Any], Any]] = {
    "2": clip(),
    "2, one by one": clip(foreach=False),
    "2, foreach": clip(foreach=True),
    "1": clip(1.0),
    "3": clip(3.0),
    "inf": clip(math.inf),
    "get_total_norm": _parted,
    "in groups": _in_groups,
    "twice": _twice,
    "by value first": _by_value_first,
    "by hand": _by_hand,
}


def _train(data: Data, model: Any, optimizer: Any, edit: Callable[[Any], Any], steps: int = STEPS) -> list[Any]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        data.loss(model, step).backward()
        seen.append(edit(model))
        optimizer.step()
    return seen


@pytest.mark.parametrize("name", CLIPPING)
def test_clipping_by_a_norm(name: str) -> None:
    require_plain(lambda data, model, optimizer: _train(data, model, optimizer, CLIPPING[name]))


def _scripted(norm: torch.Tensor) -> torch.Tensor:
    return torch.jit.CompilationUnit("def double(norm):\n  return norm * 2.0\n").double(norm)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    "read",
    [
        torch.tensor,
        lambda norm: torch.tensor(norm.detach()),
        lambda norm: torch.tensor(norm, dtype=torch.float32),
        lambda norm: torch.tensor(norm * 2 + 1),
        lambda norm: torch.arange(9.0)[(norm * 2).long().clamp(0, 8)],
        _scripted,
    ],
    ids=["tensor", "detached", "as float32", "of arithmetic", "index", "script"],
)
@pytest.mark.parametrize(
    "norm", [lambda model: nn.utils.get_total_norm(gradients(model)), lambda model: model[0].weight.grad.norm()]
)
def test_readers_that_ask_no_class_wait_for_the_norm_too(norm: Any, read: Any) -> None:
    require_plain(
        lambda data, model, optimizer: _train(data, model, optimizer, lambda model: read(norm(model))), tolerance=1e-6
    )


class _Own(torch.Tensor):
    pass


def _differentiated(norm: torch.Tensor) -> Any:
    (norm.requires_grad_() * norm * 3).backward()  # type: ignore[no-untyped-call]
    assert norm.grad is not None
    return norm.grad.clone()


@pytest.mark.parametrize("read", [_differentiated, lambda norm: norm.as_subclass(_Own).item()], ids=["gradient", "class"])
def test_a_norm_may_get_a_gradient_and_another_class(read: Any) -> None:
    require_plain(lambda data, model, optimizer: _train(data, model, optimizer, lambda model: read(clip()(model))))


def test_who_goes_on_after_an_interrupted_wait_for_a_norm_has_clipped_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a forward, and then the script saves the weights."""
    of, armed, interrupted = RoundNorms.of, threading.local(), []

    def interrupt(self: RoundNorms, *arguments: Any) -> Any:
        if getattr(armed, "is_armed", False):
            armed.is_armed = False
            raise KeyboardInterrupt
        return of(self, *arguments)

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        for step in range(STEPS):
            optimizer.zero_grad()
            data.loss(model, step).backward()
            clip()(model)
            optimizer.step()
        armed.is_armed = len(data.ranks) == 1
        try:
            data.loss(model, STEPS)
        except KeyboardInterrupt:
            interrupted.append(data.ranks)
        armed.is_armed = False
        return {name: value.clone() for name, value in model.state_dict().items()}

    monkeypatch.setattr(RoundNorms, "of", interrupt)
    require_plain(loop)
    assert sorted(interrupted) == [[0], [1]]


def test_a_norm_is_printed_as_any_tensor() -> None:
    require_plain(lambda data, model, optimizer: _train(data, model, optimizer, lambda model: f"{clip()(model)!r:.15}"))


def test_what_arithmetic_writes_to_the_users_own_tensor_is_there() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        most, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)

        def note(model: Any) -> Any:
            norm = clip()(model)
            torch.maximum(most, norm, out=most)
            return torch.add(total, norm, out=total).clone()

        return [most, *_train(data, model, optimizer, note)]

    require_plain(loop)


@pytest.mark.parametrize("name", [name for name in CLIPPING if name not in ("by value first", "twice")])
def test_nothing_waits_for_a_norm(name: str) -> None:
    def loop(network: Held | None, data: Data, model: Any, optimizer: Any) -> Any:
        _train(data, model, optimizer, CLIPPING[name], 4)
        optimizer.zero_grad()
        loss = data.loss(model, 5)
        if network is not None:
            network.hold()
            timer = threading.Timer(PATIENCE_SECONDS, network.let_go)
            timer.start()
        loss.backward()
        norm = CLIPPING[name](model)
        known = copy.deepcopy(norm)  # waits for the norm only
        optimizer.step()
        hidden = model[0](batch(7))
        if network is not None:
            assert network.let_go(), LATE
            timer.cancel()
        return norm, known, hidden, model[2](torch.tanh(hidden)), [gradient.clone() for gradient in gradients(model)]

    networked(loop)


def _histograms(data: Data, model: Any) -> None:
    if 0 in data.ranks:
        [gradient.detach().numpy().sum() for gradient in gradients(model)]


def _doubled_through_data(data: Data, model: Any) -> None:
    [gradient.data.mul_(2) for gradient in gradients(model)]


def _doubled(data: Data, model: Any) -> None:
    torch._foreach_mul_(gradients(model), 2.0)


def _the_norm_on_one_rank(data: Data, model: Any) -> None:
    if 0 in data.ranks:
        print(nn.utils.get_total_norm(gradients(model)))


BEFORE = [_histograms, _doubled_through_data, _doubled, _the_norm_on_one_rank]


@pytest.mark.parametrize("before", BEFORE, ids=lambda function: function.__name__)
def test_what_is_done_to_gradients_before_they_are_clipped(before: Callable[..., None]) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        def edit(model: Any) -> Any:
            before(data, model)
            norm = nn.utils.get_total_norm(gradients(model))
            if 1 in data.ranks:
                norm.item()  # one rank logs it
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
            return norm

        return _train(data, model, optimizer, edit)

    require_plain(loop)


def test_one_rank_begins_to_read_gradients_that_are_clipped() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        seen: list[Any] = []

        def edit(model: Any) -> Any:
            if len(seen) >= 4 and 0 in data.ranks:
                [gradient.sum() for gradient in gradients(model)]
            seen.append(clip()(model))

        _train(data, model, optimizer, edit)
        return seen

    require_plain(loop)


@pytest.mark.parametrize("synced", [True, False])
def test_accumulation(synced: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            if synced:
                data.loss(model, 50 + step).backward()
            else:
                with data.no_sync(optimizer):
                    data.loss(model, 50 + step).backward()
            data.loss(model, step).backward()
            seen.append(clip()(model))
            optimizer.step()
        return seen

    require_plain(loop)


def test_gradients_that_only_some_ranks_have() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            data.mean(lambda rank, step=step: (model if rank else model[0])(batch(rank, step)).square().mean()).backward()
            seen.append(clip()(model))
            optimizer.step()
        return seen

    require_plain(loop)


def test_two_optimizers() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        other = mlp()
        other.load_state_dict({name: torch.ones_like(value) / 3 for name, value in other.state_dict().items()})
        second = data.scheduled(sgd(other), other)
        seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            second.zero_grad()
            (data.loss(model, step) + data.loss(other, step)).backward()
            seen.append(nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 0.01))
            seen.append(clip()(other))
            optimizer.step()
            second.step()
        return [*seen, [parameter.detach().clone() for parameter in other.parameters()]]

    require_plain(loop)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_gradscaler_with_steps_that_it_skips(clips: bool, drops: bool) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        seen: list[Any] = []
        optimizer.zero_grad()
        for step in range(2 * STEPS):
            loss = data.loss(model, step)
            loss = loss * math.inf if step in (1, 6, 9) else loss
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                seen.append(clip()(model) if step not in (1, 6, 9) else None)
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
            if drops or step in (1, 6, 9):
                optimizer.zero_grad()
        return seen

    require_plain(loop)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_gradscaler_with_another_default_type(default: torch.dtype) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(data.loss(model, step)).backward()
            scaler.unscale_(optimizer)
            clip()(model)
            scaler.step(optimizer)
            scaler.update()

    torch.set_default_dtype(default)
    try:
        require_plain(loop)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_infinite_norm_is_an_error_if_that_is_asked_for() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        _train(data, model, optimizer, clip())
        (data.loss(model) * math.inf).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=True)

    # A rank that is later may hear of the other's error before it raises its own.
    with pytest.raises((RuntimeError, commsched.TransportError), match="is non-finite, so it cannot be clipped"):
        run(loop)


def test_a_norm_outlives_its_round_and_its_session() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        norms = _train(data, model, optimizer, lambda model: nn.utils.get_total_norm(gradients(model)))
        if len(data.ranks) == 1:
            assert all(isinstance(norm, Deferred) for norm in norms[2:])
        return norms

    require_plain(loop)


def _other_limit(model: Any, rank: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01 + 1e-6 * rank)


def _other_gradients(model: Any, rank: int) -> None:
    norm = nn.utils.get_total_norm(gradients(model)[rank:])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)


def _other_order(model: Any, rank: int) -> None:
    norms = nn.utils.get_total_norm(gradients(model)), nn.utils.get_total_norm(gradients(model), math.inf)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norms[rank])


@pytest.mark.parametrize("edit", [_other_limit, _other_gradients, _other_order], ids=lambda function: function.__name__)
def test_norms_that_differ_between_ranks_are_refused(edit: Callable[..., None]) -> None:
    def loop(data: Data, model: nn.Module, optimizer: Any) -> None:
        _train(data, model, optimizer, _twice)
        data.loss(model).backward()
        edit(model, data.ranks[0])
        optimizer.step()
        optimizer.synchronize()

    with pytest.raises(commsched.CommschedError, match=r"'\d\.\w+' was changed before step\(\) to other values here than on"):
        run(loop)
