"""The states of the gradient of one parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commsched.plugins.torch.slot import GRADIENT_TRANSITIONS, GradientState, Slot

from .test_rounds import Training, trained_on_two_ranks

EXPECTED, WAITING, NO_PLACE, SUBMITTED, ZEROS, OUTSTANDING = GradientState


class Partly(Training):
    """A training that may leave out the bias of its model, of which the states are watched."""

    def weight_alone(self) -> None:
        self.model.weight.sum().backward()

    def bias_alone(self) -> None:
        self.model.bias.sum().backward()

    def bias_alone_in_no_sync(self) -> None:
        with self.optimizer.no_sync():
            self.bias_alone()

    def use(self) -> None:
        self.model(torch.ones(1, 2))

    def drop_bias(self) -> None:
        self.model.bias.grad = None

    def unfreeze(self) -> None:
        self.model.bias.requires_grad_(True)

    def states(self, actions: str) -> list[GradientState]:
        """The state of the gradient of the bias after each action."""
        [slot] = [slot for slot in self.optimizer._exchange.places.all if slot.name == "bias"]
        seen = []
        for action in actions.split():
            getattr(self, action)()
            seen.append(slot.state)
        return seen


class Frozen(Partly):
    """One whose bias requires no gradient at first."""

    def make_model(self) -> nn.Linear:
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        return model


@pytest.mark.parametrize(
    ("actions", "states"),
    [
        ("backward step use", [SUBMITTED, OUTSTANDING, EXPECTED]),
        ("backward read step use", [SUBMITTED, SUBMITTED, OUTSTANDING, EXPECTED]),
        ("weight_alone step use", [EXPECTED, OUTSTANDING, EXPECTED]),
        ("weight_alone read step", [EXPECTED, ZEROS, OUTSTANDING]),
        ("weight_alone bias_alone step", [EXPECTED, SUBMITTED, OUTSTANDING]),
        ("backward weight_alone step", [SUBMITTED, WAITING, OUTSTANDING]),
        ("backward weight_alone read step", [SUBMITTED, WAITING, SUBMITTED, OUTSTANDING]),
        ("backward weight_alone drop_bias read", [SUBMITTED, WAITING, WAITING, ZEROS]),
        ("weight_alone bias_alone_in_no_sync read", [EXPECTED, WAITING, SUBMITTED]),
        ("weight_alone bias_alone_in_no_sync bias_alone_in_no_sync step", [EXPECTED, WAITING, WAITING, OUTSTANDING]),
        ("backward step backward", [SUBMITTED, OUTSTANDING, SUBMITTED]),
        ("backward drop backward", [SUBMITTED, SUBMITTED, SUBMITTED]),
    ],
)
def test_what_a_training_does_to_the_gradient_of_one_parameter(actions: str, states: list[GradientState]) -> None:
    assert trained_on_two_ranks(Partly, lambda training: training.states(actions)) == [states, states]


def test_an_unfrozen_parameter_needs_a_place_until_the_round_is_complete() -> None:
    actions = "weight_alone step unfreeze backward step use"
    states = [EXPECTED, EXPECTED, EXPECTED, NO_PLACE, OUTSTANDING, EXPECTED]
    assert trained_on_two_ranks(Frozen, lambda training: training.states(actions)) == [states, states]
    actions = "weight_alone step unfreeze bias_alone_in_no_sync weight_alone read"
    states = [EXPECTED, EXPECTED, EXPECTED, EXPECTED, WAITING, SUBMITTED]
    assert trained_on_two_ranks(Frozen, lambda training: training.states(actions)) == [states, states]


def test_every_state_can_be_left_and_reached() -> None:
    assert {state for state, _ in GRADIENT_TRANSITIONS} == set(GradientState) == set(GRADIENT_TRANSITIONS.values())


def test_nothing_is_submitted_twice_in_a_round_and_no_round_begins_while_the_update_is_outstanding() -> None:
    events = {state: {event for known, event in GRADIENT_TRANSITIONS if known is state} for state in GradientState}
    assert events[SUBMITTED] == events[ZEROS] == {"begin", "step"}
    assert events[NO_PLACE] == {"submit"}
    assert events[OUTSTANDING] == {"update"}


def test_any_other_event_raises_and_changes_nothing() -> None:
    slot = Slot("weight", nn.Parameter(torch.zeros(2)), 0, False)
    with pytest.raises(KeyError, match="step"):
        slot.advance("step")
    assert slot.state is EXPECTED


def test_the_gradient_that_waits_is_guarded_until_it_is_submitted() -> None:
    slot = Slot("weight", nn.Parameter(torch.zeros(2)), 0, False)
    reads: list[str] = []
    slot.await_gradient = lambda: reads.append("read")
    first, second = torch.ones(2), torch.ones(2)
    slot.hold(first)
    first.sum()
    slot.hold(second)
    first.sum()
    assert reads == ["read"]
    second.sum()
    assert reads == ["read"] * 2
    assert slot.waiting is second
    slot.begin_round()
    second.sum()
    assert reads == ["read"] * 2
    assert (slot.state, slot.waiting) == (EXPECTED, None)
