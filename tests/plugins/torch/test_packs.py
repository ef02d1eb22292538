"""The shortest way to the core. Small gradients that share a partition are submitted when the last of them is there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched.core.core import Core
from commsched.core.group import TensorGroup
from commsched.core.interfaces import Observer
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import cut
from commsched.core.scheduler import SchedulerConfig
from commsched.plugins.torch import ScheduledOptimizer
from commsched.plugins.torch.packs import Pack, Packs
from commsched.plugins.torch.slot import Slot
from commsched.session.local import local_sessions
from commsched.testing.world import run_world
from tests.recording_transport import RecordingTransport

SIZES = (2, 3, 20_000, 4, 5)  # elements; the third is too large to wait for others


@pytest.fixture
def group() -> Iterator[TensorGroup]:
    """All tensors in one partition."""
    core = Core(RecordingTransport(), SchedulerConfig())
    manifest = Manifest(tuple(TensorSpec(f"layer{index}", (size,), "float32") for index, size in enumerate(SIZES)))
    made = core.add_group(cut(manifest, 10**6), {"float32": memoryview(bytearray(manifest.nbytes))})
    made.begin_step()
    yield made
    core.close()


def slots_of(group: TensorGroup) -> list[Slot]:
    slots = []
    for tensor, size in enumerate(SIZES):
        slot = Slot(f"layer{tensor}", nn.Parameter(torch.zeros(size)), 0, False)
        slot.view = torch.zeros(size)
        slot.gradient = slot.view.data
        slot.references = sys.getrefcount(slot.gradient)
        slot.address, slot.group, slot.tensor = slot.view.data_ptr(), group, tensor
        slot.await_gradient = lambda: None
        slots.append(slot)
    return slots


def test_the_last_one_copies_and_submits_all(group: TensorGroup) -> None:
    slots = slots_of(group)
    Packs().begin([group], slots, allowed=True)
    small = [slots[tensor] for tensor in (4, 1, 3, 0)]
    pack = slots[0].pack
    assert isinstance(pack, Pack)
    assert all(slot.pack is pack for slot in small)
    assert slots[2].pack is not pack
    for slot in small[:3]:
        assert pack.take(slot, torch.ones_like(slot.view))
    assert not group.notified
    assert group.on_hand == {1, 3, 4}
    assert not any(slot.view.any() for slot in slots)
    slots[0].view.fill_(7.0)
    pack.note(slots[0])  # it is in its place already
    assert group.notified == {0, 1, 3, 4}
    assert all(slot.view.eq(1).all() for slot in small[:3])
    assert slots[0].view.tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(3),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, device="meta"),
        torch.ones(2).as_subclass(nn.Parameter),
    ],
)
def test_what_is_not_as_registered_is_not_taken(group: TensorGroup, gradient: torch.Tensor) -> None:
    slot = slots_of(group)[0]
    pack = Pack(group, [slot])
    assert not pack.take(slot, gradient)
    assert slot.parameter.grad is None
    assert not group.notified
    assert pack.take(slot, torch.ones(2))
    assert group.notified == {0}


def test_nothing_is_taken_while_the_own_gradient_is_held_or_was_moved(group: TensorGroup) -> None:
    slot = slots_of(group)[0]
    pack = Pack(group, [slot])
    held = slot.gradient
    assert not pack.take(slot, torch.ones(2))
    held.data = torch.zeros(2)
    del held
    assert not pack.take(slot, torch.ones(2))
    slot.gradient.data = slot.view
    slot.users = torch.ones(2)  # what backward has added to
    assert not pack.take(slot, torch.ones(2))
    slot.users = None
    slot.hold(torch.ones(2))
    assert not pack.take(slot, torch.ones(2))
    slot.begin_round()
    assert pack.take(slot, torch.ones(2))


def test_the_next_round_begins_anew(group: TensorGroup) -> None:
    """Also after a round that was broken off."""
    slots = slots_of(group)
    packs = Packs()
    packs.begin([group], slots, allowed=True)
    pack = slots[0].pack
    assert pack is not None
    assert pack.take(slots[0], torch.ones(2))
    group.next_step, group.unfinished = 0, 0
    group.begin_step()
    packs.begin([group], slots, allowed=True)
    assert slots[0].pack is pack
    for tensor in (0, 1, 3, 4):
        assert not group.notified
        pack.note(slots[tensor])
    assert group.notified == {0, 1, 3, 4}
    assert not slots[0].view.any()


def test_a_large_gradient_is_copied_and_submitted_at_once(group: TensorGroup) -> None:
    slots = slots_of(group)
    Packs().begin([group], slots, allowed=True)
    large = slots[2]
    assert large.pack is not None
    assert large.pack.slots == [large]
    assert large.pack.take(large, torch.ones_like(large.view))
    assert group.notified == {2}
    assert group.on_hand == {2}
    assert large.view.eq(1).all()
    assert large.parameter.grad is large.gradient


def test_another_plan_makes_other_packs(group: TensorGroup) -> None:
    slots = slots_of(group)
    packs = Packs()
    packs.begin([group], slots, allowed=True)
    group.plan = cut(group.manifest, 100)  # the large one is cut, and lies between the others
    packs.begin([group], slots, allowed=True)
    assert slots[0].pack is slots[1].pack is not None
    assert slots[3].pack is slots[4].pack is not None
    assert slots[0].pack is not slots[3].pack
    group.plan = cut(group.manifest, 8)
    packs.begin([group], slots, allowed=True)
    assert [slot.pack.slots if slot.pack else [] for slot in slots] == [[slot] for slot in slots]


def test_none_where_none_are_allowed(group: TensorGroup) -> None:
    slots = slots_of(group)
    packs = Packs()
    for allowed in (False, True, False):
        packs.begin([group], slots, allowed=allowed)
        assert all((slot.pack is not None) == allowed for slot in slots)


# --- in training ---


def trained(observe: bool, look: Callable[[nn.Module, Core, list[list[int]]], None]) -> None:
    """Train ten small layers on two ranks. ``look`` is called in each rank, with the tensors of each call to the core."""

    def train(rank: int) -> None:
        with sessions[rank] as session:
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(10)))
            optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
            forget = session.observe(Observer())
            if not observe:
                forget()  # as tuning does when it ends
            calls: list[list[int]] = []
            notify = session.core.notify_ready

            def noted(group: TensorGroup, tensors: Any) -> None:
                if not group.manifest.tensors[0].name.startswith("commsched."):
                    calls.append(list(tensors))
                notify(group, tensors)

            session.core.notify_ready = noted  # type: ignore[method-assign]
            for _ in range(2):
                optimizer.zero_grad()
                calls.clear()
                model(torch.full((2, 4), 1.0 + rank)).sum().backward()
                look(model, session.core, calls)
                optimizer.step()

    sessions = local_sessions(2, SchedulerConfig(partition_bytes=320, credit_bytes=10**6))  # five layers each
    run_world(2, train)


def test_backward_calls_the_core_once_for_each_partition() -> None:
    trained(False, lambda model, core, calls: _require(calls, [[9, 8, 7, 6, 5], [4, 3, 2, 1, 0]]))


def test_an_observer_sees_when_each_gradient_is_ready() -> None:
    trained(True, lambda model, core, calls: _require(calls, [[tensor] for tensor in range(9, -1, -1)]))


def _require(calls: list[list[int]], expected: list[list[int]]) -> None:
    assert calls == expected


def test_what_is_left_of_a_partition_is_submitted_when_a_gradient_is_read() -> None:
    """The last layers' gradients wait in a pack for one that this backward does not make."""

    def train(rank: int) -> list[float]:
        with sessions[rank] as session:
            torch.manual_seed(0)
            model = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
            optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
            values = []
            for _ in range(2):
                optimizer.zero_grad()
                model[2](model[1](torch.full((1, 4), 1.0 + rank))).sum().backward()
                assert model[2].weight.grad is not None
                values.append(float(model[2].weight.grad.sum()))
                optimizer.step()
            return values

    sessions = local_sessions(2, SchedulerConfig())
    first, second = run_world(2, train)
    assert first == second


def test_a_packed_gradient_cannot_be_read_within_backward() -> None:
    """Its average is outstanding, whether or not it has been copied."""

    def train(rank: int) -> str:
        with sessions[rank] as session:
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
            optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
            said = []

            def read(parameter: torch.Tensor) -> None:
                try:
                    assert parameter.grad is not None
                    parameter.grad.sum()
                except commsched.CommschedError as error:
                    said.append(str(error))

            model[2].weight.register_post_accumulate_grad_hook(read)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            return "; ".join(said)

    sessions = local_sessions(2, SchedulerConfig())
    for said in run_world(2, train):
        assert said.startswith("the gradient of '2.weight' is read within backward: its average cannot be there yet")


def test_a_gradient_that_one_rank_holds_is_not_changed_by_those_of_the_next_step() -> None:
    """The tensors that replace a held gradient count their own versions, and not those of the whole buffer."""

    def train(rank: int) -> list[float]:
        with sessions[rank] as session:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            optimizer = ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, session=session)
            held: list[torch.Tensor | None] = []
            norms: list[float] = []
            for step in range(5):
                optimizer.zero_grad()
                model(torch.full((2, 4), 1.0 + rank + step)).sum().backward()
                if step == 1 and rank == 0:
                    held = [parameter.grad for parameter in model.parameters()]
                elif step == 3:
                    held.clear()
                norms += [float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None]
                optimizer.step()
            return norms

    sessions = local_sessions(2, SchedulerConfig())
    first, second = run_world(2, train)
    assert first == second
