"""Random loops, made of what training loops are made of, in any order.

A loop is a list of actions, the same on all ranks; what differs between ranks is an argument of an action. It trains as plain
PyTorch does, or is refused by name, and only where ranks do different things, or change what is not averaged yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import commsched

from .loop import LARGE, SMALL, Data, batch, require_plain

EXAMPLES = 25  # hundreds have been run
HANGS_AFTER_SECONDS = 60.0

PARTS = 5
FROZEN, NEW = 3, 4  # at first: a part that needs no gradient, and one that the optimizer does not have, and needs none either


class Parts(nn.Module):
    """The first before all others, beside each other, where a loss uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), *(nn.Linear(4, 2) for _ in range(PARTS - 1))])
        for part in (FROZEN, NEW):
            self.parts[part].requires_grad_(False)

    def forward(self, x: torch.Tensor, use: frozenset[int]) -> torch.Tensor:
        if 0 in use:
            x = torch.tanh(self.parts[0](x))
        return sum((self.parts[part](x) for part in sorted(use - {0})), start=x[:, :2])


def parts() -> nn.Module:
    return Parts().double()


def _old(model: Any) -> list[nn.Parameter]:
    return [parameter for part in model.parts[:NEW] for parameter in part.parameters()]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(_old(model), lr=0.1, momentum=0.9, weight_decay=0.01),
    "SGD, foreach": lambda model: torch.optim.SGD(_old(model), lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda model: torch.optim.AdamW(_old(model), lr=0.01, eps=1e-3, foreach=False),
    "AdamW, foreach": lambda model: torch.optim.AdamW(_old(model), lr=0.01, eps=1e-3, foreach=True),
}


class OtherMeaning(Exception):
    """From here on the loop means, with several processes, something else than on the joint batch."""


@dataclass
class Training:
    """One rank's, or plain training."""

    data: Data
    model: Any
    optimizer: Any
    seen: list[Any] = field(default_factory=list)
    batches: int = 0
    own: bool = False  # gradients are this rank's own sums
    own_changed: bool = False  # and were changed, so that sums are not what an average is of
    saved: Any = None
    apart: bool = False  # ranks have used different parts
    stepped: bool = False  # no backward since: a rank has no gradient of what it did not use
    refuses: bool = False  # what was done may be refused

    def loss(self, uses: tuple[frozenset[int], ...]) -> torch.Tensor | None:
        """None: some rank has nothing to train."""
        self.batches += 1
        if not all(any(self.model.parts[part].weight.requires_grad for part in use) for use in uses):
            return None
        self.apart = self.apart or uses[0] != uses[1]
        self.refuses = self.refuses or self.apart
        self.stepped = False
        step = self.batches
        return self.data.mean(lambda rank: self.model(batch(rank, step), uses[rank]).square().mean())

    def backward(self, uses: tuple[frozenset[int], ...], times: int, scale: float) -> None:
        loss = self.loss(uses)
        if loss is None:
            return
        if self.own_changed:
            raise OtherMeaning
        for left in reversed(range(times)):
            (loss * scale).backward(retain_graph=left > 0)
        self.own = False

    def local(self, uses: tuple[frozenset[int], ...]) -> None:
        loss = self.loss(uses)
        if loss is None:
            return
        with self.data.no_sync(self.optimizer):
            loss.backward()
        self.own = True

    def step(self) -> None:
        self.optimizer.step()
        self.own = self.own_changed = False
        self.stepped = True

    def closure(self, uses: tuple[frozenset[int], ...]) -> None:
        def backward() -> None:
            self.zero(True, True)
            self.backward(uses, 1, 1.0)

        self.optimizer.step(backward)
        self.own = self.own_changed = False
        self.stepped = True

    def amp(self, uses: tuple[frozenset[int], ...]) -> None:
        loss = self.loss(uses)
        if loss is None or self.own_changed:
            return
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(loss).backward()
        scaler.step(self.optimizer)
        self.own = False
        self.stepped = True

    def zero(self, of_model: bool, set_to_none: bool) -> None:
        (self.model if of_model else self.optimizer).zero_grad(set_to_none=set_to_none)
        self.own = self.own_changed = False

    # --- gradients, between backward and step ---

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def changed(self, linearly: bool) -> None:
        self.refuses = self.refuses or self.own
        self.own_changed = self.own_changed or (self.own and not linearly)

    def clip_norm(self, foreach: bool) -> None:
        self.changed(False)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.05, foreach=foreach)
        self.see(norm)

    def clip_value(self, foreach: bool) -> None:
        self.changed(False)
        if self.gradients():
            nn.utils.clip_grad_value_(self.model.parameters(), 0.02, foreach=foreach)

    def clamp_data(self) -> None:
        self.changed(False)
        for gradient in self.gradients():
            gradient.data.clamp_(-0.02, 0.02)

    def scale(self, in_place: bool) -> None:
        self.changed(True)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                if in_place:
                    parameter.grad.mul_(0.5)
                else:
                    parameter.grad = parameter.grad * 0.5

    def drop(self, part: int) -> None:
        self.model.parts[part].weight.grad = None

    def assign(self, part: int) -> None:
        weight = self.model.parts[part].weight
        if part != NEW or self.has_new:
            self.changed(True)
            weight.grad = torch.full_like(weight, 0.01)

    def read_gradients(self, ranks: tuple[int, ...]) -> None:
        if len(self.data.ranks) > 1 or self.data.ranks[0] in ranks:
            norms = [gradient.norm() for gradient in self.gradients()]
            if len(ranks) > 1:
                self.see(norms)

    def see(self, value: Any) -> None:
        if not self.own and not (self.apart and self.stepped):
            self.seen.append(value)

    # --- what may be anywhere ---

    def evaluate(self, ranks: tuple[int, ...]) -> None:
        if len(self.data.ranks) > 1 or self.data.ranks[0] in ranks:
            with torch.no_grad():
                output = self.model(batch(5), frozenset(range(PARTS)))
            if len(ranks) > 1:
                self.seen.append(output)

    def read_parameters(self, part: int) -> None:
        self.seen.append(self.model.parts[part].weight.sum().item())

    def freeze(self, part: int) -> None:
        if part != NEW or self.has_new:
            module = self.model.parts[part]
            module.requires_grad_(not module.weight.requires_grad)

    @property
    def has_new(self) -> bool:
        return len(self.optimizer.param_groups) > 1

    def add(self) -> None:
        if not self.has_new:
            self.model.parts[NEW].requires_grad_(True)
            self.optimizer.add_param_group({"params": list(self.model.parts[NEW].parameters()), "lr": 0.05})

    def learning_rate(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def save(self) -> None:
        states = self.model.state_dict(), self.optimizer.state_dict()
        self.saved = copy.deepcopy(states), self.has_new
        self.seen.append(self.saved[0])

    def load(self) -> None:
        if self.saved is not None and self.saved[1] == self.has_new:
            model, optimizer = copy.deepcopy(self.saved[0])
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)


Action = tuple[str, *tuple[Any, ...]]


def train(data: Data, model: Any, optimizer: Any, actions: list[Action]) -> Training:
    training = Training(data, model, optimizer)
    for name, *arguments in actions:
        try:
            getattr(training, name)(*arguments)
        except OtherMeaning:
            break
    return training


def _uses() -> st.SearchStrategy[tuple[frozenset[int], ...]]:
    """Which parts each rank's loss uses."""
    use = st.frozensets(st.integers(0, PARTS - 1), min_size=1)
    alike = use.map(lambda each: (each, each))
    return st.one_of(alike, alike, st.tuples(use, use))


def _action(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    return st.tuples(st.just(name), *arguments)


_flag, _part, _ranks = st.booleans(), st.integers(0, PARTS - 1), st.sampled_from([(0, 1), (0,), (1,)])
_zero = _action("zero", _flag, _flag)
_passes = st.one_of(
    _action("backward", _uses(), st.just(1), st.just(1.0)),
    _action("backward", _uses(), st.sampled_from([1, 1, 2]), st.sampled_from([1.0, 64.0])),
    _action("local", _uses()),
)
_edits = st.one_of(
    _action("clip_norm", _flag),
    _action("clip_value", _flag),
    _action("clamp_data"),
    _action("scale", _flag),
    _action("drop", _part),
    _action("assign", _part),
    _action("read_gradients", _ranks),
)
_updates = st.one_of(*[_action("step")] * 5, _action("closure", _uses()), _action("amp", _uses()))
_others = st.one_of(
    _action("evaluate", _ranks),
    _action("read_parameters", _part),
    _action("freeze", _part),
    _action("add"),
    _action("learning_rate", st.sampled_from([0.01, 0.2])),
    _action("save"),
    _action("load"),
    _zero,
)


def _some(actions: st.SearchStrategy[Action], most: int, least: int = 0) -> st.SearchStrategy[list[Action]]:
    return st.lists(actions, min_size=least, max_size=most)


_step = st.tuples(
    _some(_zero, 1), _some(_passes, 3), _some(_edits | _others, 2), _some(_passes, 1), _some(_updates, 1), _some(_others, 2)
).map(lambda phases: [action for phase in phases for action in phase])
LOOPS = st.lists(_step, min_size=1, max_size=5).map(lambda steps: [action for step in steps for action in step])


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
@given(LOOPS, st.sampled_from(sorted(OPTIMIZERS)), _flag, _flag)
def test_random_loops(actions: list[Action], optimizer: str, small: bool, ordered: bool) -> None:
    require_plain_or_refused(actions, optimizer, SMALL if small else LARGE, ordered)


def require_plain_or_refused(
    actions: list[Action], optimizer: str = "SGD", config: commsched.SchedulerConfig = SMALL, ordered: bool = False
) -> None:
    refuses = False

    def loop(data: Data, model: Any, its_optimizer: Any) -> list[Any]:
        nonlocal refuses
        training = train(data, model, its_optimizer, actions)
        refuses = refuses or training.refuses
        return training.seen

    try:
        require_plain(
            loop,
            model=parts,
            optimizer=OPTIMIZERS[optimizer],
            config=config,
            ordered=ordered,
            timeout_seconds=HANGS_AFTER_SECONDS,
        )
    except commsched.CommschedError:
        if not refuses:
            raise
