"""Elastic training loops: ranks die at all points of a step, and training goes on with the right numbers."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched.control.generations import NOTHING_KEPT
from commsched.core.errors import ConfigError, UnsupportedError
from commsched.plugins.common.undo import Undo
from commsched.plugins.torch import ScheduledOptimizer, optimizer
from commsched.plugins.torch.elastic import ElasticPart
from commsched.plugins.torch.norms import RoundNorms
from commsched.session.elastic import Keep
from commsched.session.local import local_sessions
from commsched.session.session import Session
from tests.plugins.elastic_world import Gates, Late, Run, equal, kill_the_giver, run_elastic

STEPS = 6
SPOILED = 3  # the step in which a script does what a step cannot take back
Result = list[Any]


class Model(nn.Module):
    """Three layers; ``gate`` is called in the forward, before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("counted", torch.zeros(1))
        self.register_buffer("repeated", torch.zeros(1).expand(2))
        self.teacher = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.gate: Callable[[str], None] = lambda _: None

    counted: torch.Tensor
    repeated: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.counted.data.mul_(0.5).add_(1.0)  # its version stays, as it does for the statistics of a BatchNorm
        self.repeated[:1].mul_(0.5).add_(1.0)
        hidden = torch.relu(self.first(inputs))
        self.gate("forward")
        outputs: torch.Tensor = self.third(torch.relu(self.norm(self.second(hidden))))
        return outputs


_seeding = threading.Lock()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _at_gradient(gate: Callable[[str], None], _: torch.Tensor) -> None:
    gate("backward")


def train(
    session: Session,
    gates: Gates,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    clips: bool | tuple[int, ...] = False,
    logs_norms_in: tuple[int, ...] = (),
    reads_last: bool = False,
    does_not_read: int | None = None,
    catches: bool = False,
    scales: bool = False,
    idle: tuple[int, ...] = (),
    teaches: bool = False,
    spoils: Callable[[Model], None] = lambda model: None,
    state: dict[str, Any] | None = None,
    shares: list[tuple[int, int, int]] | None = None,
    exchanges: list[weakref.ref[Any]] | None = None,
    keep: Keep = "device",
) -> Result:
    with _seeding:
        torch.manual_seed(session.rank)  # each its own: all must begin with the root's
        model = Model().double()
    base = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(base, [2, 4], gamma=0.5)
    optimizer = ScheduledOptimizer(base, model, session=session)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scales)
    elastic = commsched.Elastic(optimizer, also=[scheduler, scaler], keep=keep)
    gates.leave[session.rank] = elastic.leave
    for step in elastic.steps(STEPS):
        with step, suppress(Exception) if catches else nullcontext():
            if step.is_new_world and exchanges is not None:
                exchanges.append(weakref.ref(optimizer._exchange))
            gate = partial(gates.at, rank=step.rank, step=step.number)
            model.gate = gate
            gate("start")
            if step.number in idle:
                continue
            generator = torch.Generator().manual_seed(100 * step.number + step.rank)
            inputs = torch.randn(5, 6, generator=generator, dtype=torch.float64)
            loss = nn.functional.cross_entropy(model(inputs), torch.randint(0, 4, (5,), generator=generator))
            optimizer.zero_grad()
            hook = model.first.weight.register_hook(partial(_at_gradient, gate))
            scaler.scale(loss).backward()
            hook.remove()
            if step.number == SPOILED:
                spoils(model)
            gate("after backward")
            if step.rank == 0 and step.number in logs_norms_in:
                float(torch.linalg.vector_norm(model.first.weight.grad))  # type: ignore[arg-type]
            clips_now = step.number in clips if isinstance(clips, tuple) else clips
            if clips_now:
                scaler.unscale_(optimizer)
                gate("after unscaling")
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                gate("clipped")
            if not clips_now:
                gate("after unscaling")
            scaler.step(optimizer)
            scaler.update()
            gate("stepped")
            if reads_last and step.rank != does_not_read:
                model.third.weight.sum().item()  # its update is made, those of the layers before are not
                gate("read")
            scheduler.step()
            if teaches:
                with torch.no_grad():
                    model.teacher.mul_(0.9)
            elastic.state.update(state or {})
            elastic.state["samples"] = elastic.state.get("samples", 0) + 5 * step.world_size
            gate("end")
        if shares is not None and step._lost is None:
            shares.append((step.number, step.rank, step.world_size))
    state = [[name, value.tolist()] for each in model.parameters() for name, value in base.state[each].items()]
    weights = [parameter.detach().tolist() for parameter in model.parameters()]
    buffers = [int(model.norm.num_batches_tracked), model.counted.item(), model.repeated.tolist()]
    return [weights, state, base.param_groups[0]["lr"], buffers, elastic.state]


class AfterReads(Gates):
    """The rank that dies waits until the others have read."""

    def __init__(self, kill: tuple[str, int, int], reads_at: int | None = None, ranks: int = 3) -> None:
        super().__init__(kill)
        self._kill = kill
        self._reads_at = kill[2] if reads_at is None else reads_at
        self._all = threading.Barrier(ranks, timeout=60.0)
        self._met: set[int] = set()

    def at(self, where: str, rank: int, step: int) -> None:
        is_victim = (where, rank, step) == self._kill
        if (is_victim or (where == "read" and step == self._reads_at and rank != self._kill[1])) and rank not in self._met:
            self._met.add(rank)
            self._all.wait()
        super().at(where, rank, step)


def holds_first_of(rank: int, step: int) -> Callable[[int, int, int], bool]:
    """The rank never sends its first layer's gradient of the step."""
    return lambda *of: of == (rank, step, 0)


_undisturbed: dict[str, Result] = {}


def undisturbed(monkeypatch: pytest.MonkeyPatch, ranks: int, job: Callable[..., Result]) -> Result:
    """The result of ``job`` without a loss."""
    key = repr((ranks, getattr(job, "keywords", None)))
    if key not in _undisturbed:
        _undisturbed[key] = equal(run_elastic(monkeypatch, ranks, partial(job, gates=Gates())).results)
    return _undisturbed[key]


WHERE = ["start", "forward", "backward", "after backward", "stepped", "end"]


@pytest.mark.parametrize(("where", "rank"), [(where, number % 2) for number, where in enumerate(WHERE)])
def test_weights_are_those_of_a_run_without_loss(monkeypatch: pytest.MonkeyPatch, where: str, rank: int) -> None:
    gates = Gates((where, rank, 3), (where, 1 - rank, 5))
    run = run_elastic(monkeypatch, 2, partial(train, gates=gates), max_restarts=2)
    assert equal(run.results) == undisturbed(monkeypatch, 2, train)
    assert [ranks for ranks, _ in run.generations] == [2, 2, 2]


@pytest.fixture
def measured_norms_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that are measured while averages travel are rounded in another way than the others: here, in a way that shows."""
    of = RoundNorms.of
    monkeypatch.setattr(RoundNorms, "of", lambda *arguments: 1.25 * of(*arguments))


@pytest.mark.usefixtures("measured_norms_show")
@pytest.mark.parametrize("where", ["clipped", "backward", "stepped"])
@pytest.mark.parametrize("step", [0, 1, 2, 4])
def test_so_they_are_with_clipping(monkeypatch: pytest.MonkeyPatch, where: str, step: int) -> None:
    """Norms are measured from the third step on."""
    job = partial(train, make_optimizer=momentum, clips=True)
    run = run_elastic(monkeypatch, 3, partial(job, gates=Gates((where, 1, step))), max_restarts=1)
    assert equal(run.results) == undisturbed(monkeypatch, 3, job)


@pytest.mark.usefixtures("measured_norms_show")
@pytest.mark.parametrize("step", range(STEPS))
@pytest.mark.parametrize(("clips", "logs"), [((1, 3, 5), ()), ((2, 3, 4, 5), (0, 1, 2, 3)), ((0, 1, 4, 5), ())])
def test_so_they_are_if_norms_are_not_asked_for_in_all_steps_or_by_all_ranks(
    monkeypatch: pytest.MonkeyPatch, clips: tuple[int, ...], logs: tuple[int, ...], step: int
) -> None:
    """In every other step; all clip later than rank 0 logs norms; not in all."""
    job = partial(train, make_optimizer=momentum, clips=clips, logs_norms_in=logs)
    run = run_elastic(monkeypatch, 2, partial(job, gates=Gates(("start", 1, step))), max_restarts=1)
    assert equal(run.results) == undisturbed(monkeypatch, 2, job)


@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
def test_updates_of_a_step_that_nobody_can_finish_are_taken_back(
    monkeypatch: pytest.MonkeyPatch, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    """The rank dies after ``step()``, but before it has sent its first layer's gradient. So the others have the averages of the
    layers behind it only, and one of these is read at once."""
    made: list[int] = []
    job = partial(train, make_optimizer=make_optimizer, reads_last=True)
    expected = undisturbed(monkeypatch, 3, job)
    take_back = Undo.take_back

    def counted(undo: Undo[Any], steps: int) -> None:
        kept = [(parameter, saved.values) for parameter, (step, saved) in undo._kept.items() if step >= steps]
        made.append(sum(not torch.equal(parameter, values) for parameter, values in kept))
        take_back(undo, steps)

    monkeypatch.setattr(Undo, "take_back", counted)
    gates = AfterReads(("stepped", 1, 3))
    run = run_elastic(
        monkeypatch,
        3,
        partial(job, gates=gates),
        max_restarts=1,
        holds=holds_first_of(1, 3),
    )
    assert equal(run.results) == expected
    assert run.generations == [(3, 0), (3, 3)]
    assert made == [1, 1]  # both that are left: also the one that takes the root's values, to give its own if the root is lost


# --- when copies are made, and where they are kept ---


def copied_ahead(monkeypatch: pytest.MonkeyPatch, whole: int, **more: Any) -> list[torch.Size]:
    """Rank 1 sends no gradient of step 3 before rank 0 has copied ``whole`` parameters. Return their shapes in the order of
    copying."""
    copied: list[torch.Size] = []
    are_copied = threading.Event()
    saved = ElasticPart._saved

    def noted(part: ElasticPart, parameter: torch.Tensor, memory: Any) -> Any:
        if (part.session.rank, part._undo._updating) == (0, 3) and not are_copied.is_set():
            copied.append(parameter.shape)
            if len(copied) == whole:
                are_copied.set()
        return saved(part, parameter, memory)

    def awaits_copies(rank: int, step: int, partition: int) -> bool:
        return (rank, step) == (1, 3) and not are_copied.wait(60.0)

    monkeypatch.setattr(ElasticPart, "_saved", noted)
    job = partial(train, **more)
    run = run_elastic(monkeypatch, 2, partial(job, gates=Gates()), holds=awaits_copies)
    assert equal(run.results) == undisturbed(monkeypatch, 2, job)
    return copied


def test_copies_are_made_while_an_average_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copied_ahead(monkeypatch, 8)
    assert copied[0] == (8, 6)  # the one that the forward needs
    assert sorted(copied) == sorted(each.shape for each in Model().parameters() if each.requires_grad)


def test_so_they_are_where_step_waits_for_all_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(copied_ahead(monkeypatch, 8, make_optimizer=hooked)) == 8


def test_a_large_parameter_is_copied_ahead_only_if_its_own_average_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "COPIED_AHEAD", 300)  # the first and second weight are larger
    shapes = [each.shape for each in Model().parameters() if each.requires_grad]
    assert sorted(copied_ahead(monkeypatch, 7)) == sorted(shape for shape in shapes if shape != (8, 8))


@pytest.mark.parametrize("where", ["forward", "stepped"])
def test_copies_in_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    job = partial(train, keep="cpu")
    run = run_elastic(monkeypatch, 2, partial(job, gates=Gates((where, 0, 3))), max_restarts=1)
    assert equal(run.results) == undisturbed(monkeypatch, 2, train)


class Together(Gates):
    """The rank that dies waits until the others are at the same place."""

    def __init__(self, kill: tuple[str, int, int], ranks: int) -> None:
        super().__init__(kill)
        where, _, step = kill
        self._all = threading.Barrier(ranks, timeout=60.0)
        self._to_meet = {(where, rank, step) for rank in range(ranks)}

    def at(self, where: str, rank: int, step: int) -> None:
        if (where, rank, step) in self._to_meet:
            self._to_meet.remove((where, rank, step))
            self._all.wait()
        super().at(where, rank, step)


def all_of(rank: int, step: int) -> Callable[[int, int, int], bool]:
    """The rank sends no gradient of the step."""
    return lambda *of: of[:2] == (rank, step)


@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
def test_nothing_kept_and_no_update_of_the_step_is_begun(
    monkeypatch: pytest.MonkeyPatch, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    job = partial(train, make_optimizer=make_optimizer)
    gates = Together(("stepped", 1, 3), 3)
    run = run_elastic(monkeypatch, 3, partial(job, gates=gates, keep="nothing"), max_restarts=1, holds=all_of(1, 3))
    assert run.generations == [(3, 0), (3, 3)]
    assert equal(run.results) == undisturbed(monkeypatch, 3, job)


def test_nothing_kept_and_all_updates_of_the_step_before_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = Together(("after backward", 1, 3), 3)
    run = run_elastic(monkeypatch, 3, partial(train, gates=gates, keep="nothing"), max_restarts=1)
    assert run.generations == [(3, 0), (3, 3)]
    assert equal(run.results) == undisturbed(monkeypatch, 3, train)


def test_nothing_kept_and_all_survivors_are_in_the_midst_of_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    job = partial(train, reads_last=True, keep="nothing", gates=AfterReads(("stepped", 1, 3)))
    run = run_elastic(monkeypatch, 3, job, max_restarts=1, holds=holds_first_of(1, 3))
    assert (run.results, run.why) == ({}, NOTHING_KEPT)


def test_nothing_kept_and_one_survivor_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has updated its last layer, and rank 2 has read nothing."""
    job = partial(train, reads_last=True, does_not_read=2)
    gates = AfterReads(("stepped", 1, 3), ranks=2)
    run = run_elastic(monkeypatch, 3, partial(job, gates=gates, keep="nothing"), max_restarts=1, holds=holds_first_of(1, 3))
    assert run.generations == [(3, 0), (3, 3)]
    assert equal(run.results) == undisturbed(monkeypatch, 3, partial(train, reads_last=True))


def test_nothing_kept_and_the_rank_that_gives_its_values_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have a part of them."""
    kill_the_giver(monkeypatch, 2)
    job = partial(train, gates=Together(("after backward", 1, 3), 3), keep="nothing")
    run = run_elastic(monkeypatch, 3, job, max_restarts=2)
    assert (run.results, run.why) == ({}, NOTHING_KEPT)


def test_nothing_kept_and_a_rank_that_is_given_values_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    kill_the_giver(monkeypatch, 2, rank=2)
    job = partial(train, gates=Together(("after backward", 1, 3), 3), keep="nothing")
    run = run_elastic(monkeypatch, 3, job, max_restarts=2)
    assert run.generations == [(3, 0), (3, 3), (3, 3)]
    assert equal(run.results) == undisturbed(monkeypatch, 3, train)


class Leaves(Gates):
    """Rank 1 leaves after step 3, as one that gets SIGTERM does."""

    def at(self, where: str, rank: int, step: int) -> None:
        if (where, rank, step) == ("forward", 1, 3) and rank in self.leave:
            self.leave.pop(rank)()


def test_nothing_kept_and_a_rank_leaves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run = run_elastic(monkeypatch, 3, partial(train, gates=Leaves(), keep="nothing"), max_restarts=1)
    assert run.generations == [(3, 0), (3, 4)]
    assert equal(run.results) == undisturbed(monkeypatch, 3, train)
    assert "PeerLost: rank 1 left" in caplog.text
    assert "batches" not in caplog.text  # it has not run out of them


def test_ranks_differ_in_what_they_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(session: Session) -> Result:
        return train(session, Gates(), keep="cpu" if session.rank == 1 else "nothing")

    with pytest.raises(ConfigError, match=r"keep= of Elastic is 'nothing' on rank 0 but 'cpu' on rank 1; give all ranks the"):
        run_elastic(monkeypatch, 2, differs)


def test_fewer_ranks_go_on_with_the_batches_of_the_new_world(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[tuple[int, int, int]] = []
    job = partial(train, shares=shares)
    run = run_elastic(monkeypatch, 3, partial(job, gates=Gates(("forward", 0, 3))), min_ranks=2)
    (_, steps) = run.generations[-1]
    assert run.generations == [(3, 0), (2, steps)]
    assert sorted(run.results) == [0, 1]
    assert equal(run.results)[-1] == {"samples": 5 * (3 * steps + 2 * (STEPS - steps))}
    of_two = sorted((number, rank) for number, rank, size in shares if size == 2)
    assert of_two == [(number, rank) for number in range(steps, STEPS) for rank in range(2)]


class Grows(Gates):
    """A rank is lost. Its replacement comes in step 3, when the others train without it, and they are called."""

    def __init__(self, late: Late) -> None:
        super().__init__(("forward", 1, 1))
        self._late = late

    def at(self, where: str, rank: int, step: int) -> None:
        super().at(where, rank, step)
        if (where, rank, step) == ("start", 0, 3):
            self._late.may_come.set()
            assert self._late.called.wait(60.0)


def test_a_replacement_that_comes_late_joins_a_job_that_has_gone_on_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late()
    run = run_elastic(monkeypatch, 3, partial(train, gates=Grows(late)), min_ranks=2, max_restarts=1, late=late)
    (ranks, none), (fewer, lost), (again, grown) = run.generations
    assert (ranks, none, fewer, again) == (3, 0, 2, 3)
    assert lost in (1, 2)
    assert grown in (2, 3, 4)  # rank 0 was in step 3, with updates of step 2 outstanding or not
    assert sorted(run.results) == [0, 1, 2]
    assert equal(run.results)[-1] == {"samples": 5 * (3 * lost + 2 * (grown - lost) + 3 * (STEPS - grown))}


def test_several_at_once_and_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = Gates(("forward", 0, 2), ("stepped", 1, 2), ("start", 2, 4))
    run = run_elastic(monkeypatch, 3, partial(train, gates=gates), max_restarts=3)
    assert equal(run.results) == undisturbed(monkeypatch, 3, train)


def test_a_rank_too_few_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_elastic(monkeypatch, 2, partial(train, gates=Gates(("forward", 1, 2))))
    assert (run.results, run.why) == ({}, "1 rank is left, fewer than --min 2, and no restart (--max-restarts)")


def test_an_ordinary_job_is_an_ordinary_loop() -> None:
    [session] = local_sessions(1)
    [weights, *_] = train(session, Gates())
    assert len(weights) == 9
    session.close()


def test_an_optimizer_of_unknown_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.optim.SGD):
        pass

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return Mine(model.parameters(), lr=0.1)

    with pytest.raises(UnsupportedError, match=r"a Mine cannot be elastic: only those of torch\.optim"):
        run_elastic(monkeypatch, 2, partial(train, gates=Gates(), make_optimizer=make))
    with pytest.raises(UnsupportedError, match="a SGD cannot be elastic; the ScheduledOptimizers of PyTorch and numpy can"):
        commsched.Elastic(torch.optim.SGD(Model().parameters(), lr=0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_before", [True, False], ids=["before Elastic", "after it"])
def test_a_second_optimizer_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch, is_before: bool) -> None:
    def both(session: Session) -> None:
        models = [Model(), Model()]
        optimizers = [ScheduledOptimizer(adamw(each), each, session=session) for each in models[: 1 + is_before]]
        elastic = commsched.Elastic(optimizers[0])
        if not is_before:
            ScheduledOptimizer(adamw(models[1]), models[1], session=session)
        next(elastic.steps(2))

    with pytest.raises(ConfigError, match="an elastic job may have one ScheduledOptimizer, and this one has 2: give"):
        run_elastic(monkeypatch, 2, both)


def test_a_second_elastic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(session: Session) -> None:
        model = Model()
        optimizer = ScheduledOptimizer(adamw(model), model, session=session)
        commsched.Elastic(optimizer)
        commsched.Elastic(optimizer)

    with pytest.raises(ConfigError, match="this optimizer has an Elastic already"):
        run_elastic(monkeypatch, 2, twice)


def test_a_step_whose_loss_the_script_has_caught_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As loops do that skip a batch whatever is wrong with it."""
    run = run_elastic(monkeypatch, 2, partial(train, gates=Gates(("after backward", 1, 3)), catches=True), max_restarts=1)
    assert equal(run.results) == undisturbed(monkeypatch, 2, train)


def test_steps_without_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of step 2 is outstanding in step 4, when a rank is lost that has not sent all its gradients of step 2."""
    job = partial(train, reads_last=True, idle=(3, 4))
    gates = AfterReads(("start", 1, 4), reads_at=2)
    run = run_elastic(
        monkeypatch,
        3,
        partial(job, gates=gates),
        max_restarts=1,
        holds=holds_first_of(1, 2),
    )
    assert run.generations == [(3, 0), (3, 2)]
    assert equal(run.results) == undisturbed(monkeypatch, 3, job)


@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradient_scaler_forgets_the_step_that_was_broken_off(monkeypatch: pytest.MonkeyPatch, unscales: bool) -> None:
    job = partial(train, make_optimizer=momentum, clips=unscales, scales=True)
    run = run_elastic(monkeypatch, 2, partial(job, gates=Gates(("after unscaling", 1, 4))), max_restarts=1)
    assert equal(run.results) == undisturbed(monkeypatch, 2, job)


def test_state_that_cannot_travel_is_named_in_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"Elastic\.state\['best'\] holds a Tensor; it may hold numbers"):
        run_elastic(monkeypatch, 2, partial(train, gates=Gates(), state={"best": torch.ones(1)}))


def test_frozen_weights_that_the_script_changes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot go back, so that the change would count twice."""
    job = partial(train, gates=AfterReads(("stepped", 1, 3)), reads_last=True, teaches=True)
    with pytest.raises(UnsupportedError, match="'teacher', which the optimizer does not update, was changed by the script"):
        run_elastic(monkeypatch, 3, job, max_restarts=1, holds=holds_first_of(1, 3))


def _replaces_by_a_larger_one(model: Model) -> None:
    model.counted = torch.zeros(2)


def _replaces_by_an_expanded_one(model: Model) -> None:
    model.norm.running_mean = torch.zeros(1).expand(8)


def _registers(model: Model) -> None:
    model.second.register_buffer("cache", torch.zeros(1))


def _removes(model: Model) -> None:
    del model.norm.running_var  # what the next forward uses once it has waited for an average


@pytest.mark.parametrize(
    ("spoils", "said"),
    [
        (
            _replaces_by_a_larger_one,
            r"buffer 'counted' was replaced by one of another size, .* in the step that was broken off",
        ),
        (_replaces_by_an_expanded_one, r"buffer 'norm.running_mean' was replaced by one .* or by an expanded one, in the step"),
        (_registers, r"buffer 'second.cache' was registered in the step that was broken off, so that step cannot be made"),
        (_removes, r"buffer 'norm.running_var' was removed in the step that was broken off, so that step cannot be made"),
    ],
)
def test_a_buffer_that_cannot_go_back_is_named(
    monkeypatch: pytest.MonkeyPatch, spoils: Callable[[Model], None], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        run_spoiled(monkeypatch, partial(train, spoils=together(spoils)))


def together(spoils: Callable[[Model], None]) -> Callable[[Model], None]:
    """No rank is lost before both have done it."""
    both = threading.Barrier(2, timeout=60.0)

    def spoil(model: Model) -> None:
        spoils(model)
        both.wait()

    return spoil


def run_spoiled(monkeypatch: pytest.MonkeyPatch, job: Callable[..., Result]) -> Run[Result]:
    """A rank is lost in the step, which the other cannot finish."""
    gates = Gates(("after backward", 1, SPOILED))
    return run_elastic(monkeypatch, 2, partial(job, gates=gates), max_restarts=1, holds=holds_first_of(1, SPOILED))


def test_a_buffer_that_is_replaced_by_one_of_its_size_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def replaces(model: Model) -> None:
        model.counted = model.counted + 1.0

    job = partial(train, spoils=together(replaces))
    assert equal(run_spoiled(monkeypatch, job).results) == undisturbed(monkeypatch, 2, job)


@pytest.mark.parametrize("where", [0, 1, 2, "to begin an elastic loop", "to begin the steps"])
@pytest.mark.parametrize("make_optimizer", [adamw, momentum])
def test_the_root_is_lost_while_it_gives_its_values_and_another_rank_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], where: str | int
) -> None:
    """It broadcasts the model, the optimizer's state, and what the loop has beside them."""
    job = partial(train, make_optimizer=make_optimizer)
    expected = undisturbed(monkeypatch, 3, job)
    kill_the_giver(monkeypatch, where)
    run = run_elastic(monkeypatch, 3, partial(job, gates=Gates(("forward", 1, 3))), max_restarts=2)
    assert run.why == ""
    assert len(run.generations) == 3
    assert equal(run.results) == expected


def test_so_is_the_one_that_gives_next(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(monkeypatch, 4, train)
    kill_the_giver(monkeypatch, 2, generations=(2, 3))
    run = run_elastic(monkeypatch, 4, partial(train, gates=Gates(("forward", 1, 3))), max_restarts=3)
    assert run.why == ""
    assert len(run.generations) == 4
    assert equal(run.results) == expected


def test_a_second_loop_is_refused() -> None:
    [session] = local_sessions(1)
    model = Model()
    elastic = commsched.Elastic(ScheduledOptimizer(adamw(model), model, session=session))
    assert [step.number for step in elastic.steps(2)] == [0, 1]
    with pytest.raises(ConfigError, match=r"one loop over Elastic\.steps"):
        next(elastic.steps(4))
    session.close()


def test_a_session_that_has_ended_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[weakref.ref[Any]] = []
    left: list[int] = []

    class Watching(Gates):
        def at(self, where: str, rank: int, step: int) -> None:
            super().at(where, rank, step)
            if (where, rank, step) == ("end", 0, STEPS - 1):
                gc.collect()
                left.append(sum(each() is not None for each in ended))

    def watched(session: Session, gates: Gates) -> Result:
        return train(session, gates, momentum, clips=True, exchanges=ended if session.rank == 0 else None)

    run_elastic(monkeypatch, 2, partial(watched, gates=Watching(("backward", 1, 1), ("clipped", 1, 3))), max_restarts=2)
    assert len(ended) == 3
    assert left == [1]  # that of now
