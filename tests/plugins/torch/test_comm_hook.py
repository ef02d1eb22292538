"""DistributedDataParallel with the communication hook trains as it does without: ranks are threads, each with a gloo process
group of its own; sends and replies of the hook are delayed."""

from __future__ import annotations

import copy
import gc
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commsched.plugins.torch as cs
from commsched import SchedulerConfig, Session
from commsched.core.errors import ConfigError, ManifestMismatch, TransportError, UnsupportedError
from commsched.core.interfaces import Transport
from commsched.session.local import local_sessions
from commsched.testing.check_plugin import Delayed
from commsched.testing.world import run_world
from tests import warm
from tests.jobs.job import run_job

STEPS = 5
SMALL = SchedulerConfig(partition_bytes=64, credit_bytes=128)  # every tensor is cut
TINY_BUCKETS = 100 / 2**20  # MB, as DDP takes it: several buckets, once it has built them anew after the first step

Weights = dict[str, torch.Tensor]
RankLoop = Callable[[int, Session, dist.ProcessGroup], Any]


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP notes for the compiler, once for all threads, which model is within its forward: one would restore another's."""
    monkeypatch.setattr(DistributedDataParallel, "_inside_ddp_forward", lambda _: nullcontext())


def run(loop: RankLoop, world_size: int = 2, *, one_rank_sessions: bool = False) -> list[Any]:
    """``loop(rank, session, process_group)`` on every rank."""

    def rank_loop(rank: int) -> Any:
        group = process_group(store, rank, world_size)
        with sessions[rank] as session:
            return loop(rank, session, group)

    def delayed(transport: Transport) -> Transport:
        return Delayed(transport, transport.rank, 0.002)

    store = dist.HashStore()
    if one_rank_sessions:
        sessions = [local_sessions(1)[0] for _ in range(world_size)]
    else:
        sessions = local_sessions(world_size, SMALL, wrap_transport=delayed)
    try:
        return run_world(world_size, rank_loop, timeout_seconds=300)
    finally:
        for session in sessions:
            session.abort("the test is over")


def process_group(store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
    """One for this thread; ``init_process_group`` makes one for the process."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timedelta(seconds=120)
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(store, rank, world_size, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def mean_square(forward: nn.Module, inputs: torch.Tensor, step: int) -> torch.Tensor:
    return forward(inputs).square().mean()


class Branches(nn.Module):
    """Uses one of its two branches, by the batch, or always the left one."""

    def __init__(self, always_left: bool = False) -> None:
        super().__init__()
        self.always_left = always_left
        self.before, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.before(inputs).tanh()
        return self.left(hidden) if self.always_left or inputs[0, 0] > 0 else self.right(hidden)


class ManyTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_single = nn.Parameter(torch.randn(4, 8, dtype=torch.float32))
        self.of_half = nn.Parameter(torch.randn(8, dtype=torch.float16))
        self.of_brain = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
        self.of_double = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs @ self.of_single.double() * self.of_half.double() + self.of_brain.double()
        return self.of_double(hidden).tanh()


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.before, self.blocks = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.before(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        return hidden


def frozen() -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return model


def ignored() -> nn.Module:
    """Its first layer is not DDP's to average."""
    model = mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    return model


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make_seeded() -> nn.Module:
        torch.manual_seed(3)
        return make()

    return make_seeded


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = mlp
    options: dict[str, Any] = field(default_factory=dict)  # of DistributedDataParallel
    loss: Callable[[nn.Module, torch.Tensor, int], torch.Tensor] = mean_square
    accumulate: int = 1  # backwards per step, all but the last within no_sync()
    set_to_none: bool = True
    tolerance: float = 1e-9
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD


TINY = {"bucket_cap_mb": TINY_BUCKETS}
CASES = {
    "one bucket": Case(),
    "tiny buckets": Case(options=TINY),
    "adam": Case(options=TINY, optimizer=torch.optim.Adam),
    "bucket views": Case(options={**TINY, "gradient_as_bucket_view": True}),
    "bucket views, zeroed": Case(options={**TINY, "gradient_as_bucket_view": True}, set_to_none=False),
    "accumulated": Case(options=TINY, accumulate=3),
    "accumulated in bucket views": Case(options={**TINY, "gradient_as_bucket_view": True}, accumulate=2),
    "static graph": Case(options={**TINY, "static_graph": True}),
    "unused": Case(lambda: Branches().double(), {**TINY, "find_unused_parameters": True}),
    "unused, static graph": Case(lambda: Branches(True).double(), {**TINY, "static_graph": True}),
    "frozen": Case(frozen, TINY),
    "ignored": Case(ignored, TINY),
    "batch normalisation": Case(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).double(), TINY),
    "convolution, channels last": Case(
        lambda: (
            nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Conv2d(3, 2, (1, 1)))
            .double()
            .to(memory_format=torch.channels_last)
        ),
        TINY,
    ),
    "several types": Case(ManyTypes, TINY, tolerance=2e-2),
    "checkpoints": Case(lambda: Checkpointed(False).double(), TINY),
    "reentrant checkpoints": Case(lambda: Checkpointed(True).double(), {**TINY, "static_graph": True}),
}


def train(case: Case, rank: int, forward: nn.Module, model: nn.Module) -> Weights:
    optimizer = case.optimizer(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=case.set_to_none)
        for part in range(case.accumulate):
            last = part == case.accumulate - 1
            with nullcontext() if last or not isinstance(forward, DistributedDataParallel) else forward.no_sync():
                case.loss(forward, batch(rank, case.accumulate * step + part), step).backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def train_ddp(case: Case, world_size: int, *, hooked: bool, one_rank_sessions: bool = False) -> list[Weights]:
    """Each rank's weights."""

    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> Weights:
        ddp = DistributedDataParallel(models[rank], process_group=group, **case.options)
        if hooked:
            ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        return train(case, rank, ddp, models[rank])

    models = []
    for _ in range(world_size):
        torch.manual_seed(3)
        models.append(case.make())
    return run(loop, world_size, one_rank_sessions=one_rank_sessions)


def require_close(ours: list[Weights], theirs: list[Weights], tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for name, expected in other.items():
            difference = (mine[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
            assert difference <= tolerance, f"'{name}' differs from DDP without the hook by {difference:.2e} of its largest"


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_without_the_hook(name: str) -> None:
    case = CASES[name]
    ours = train_ddp(case, 2, hooked=True)
    require_close(ours, train_ddp(case, 2, hooked=False), case.tolerance)
    trained = [key for key, parameter in case.make().named_parameters() if key not in ("0.weight", "0.bias")]
    for key in trained:
        assert torch.equal(ours[0][key], ours[1][key]), f"'{key}' differs between the ranks"


def test_three_ranks_train_as_one_with_the_joint_batch() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        mean_square(model, torch.cat([batch(rank, step) for rank in range(3)]), step).backward()
        optimizer.step()
    require_close(train_ddp(CASES["tiny buckets"], 3, hooked=True), [model.state_dict()] * 3, 1e-9)


def test_disabled_it_is_ddp_to_the_bit() -> None:
    """With ``COMMSCHED_DISABLE=1`` each session has one rank. Three ranks: a third is rounded."""
    ours = train_ddp(CASES["tiny buckets"], 3, hooked=True, one_rank_sessions=True)
    for mine, other in zip(ours, train_ddp(CASES["tiny buckets"], 3, hooked=False), strict=True):
        for name, expected in other.items():
            assert torch.equal(mine[name], expected), name


def test_two_models_in_one_backward() -> None:
    def loop(hooked: bool, rank: int, session: Session, group: dist.ProcessGroup) -> Weights:
        ddps = [DistributedDataParallel(model, process_group=group, bucket_cap_mb=TINY_BUCKETS) for model in models[rank]]
        for ddp in ddps if hooked else []:
            ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        both = nn.ModuleList(models[rank])
        optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            encoded = ddps[0](batch(rank, step))
            ddps[1](encoded.repeat(1, 2)).square().mean().backward()
            ddps[1](batch(rank, 50 + step)).square().mean().backward()
            optimizer.step()
        return copy.deepcopy(both.state_dict())

    models = [[mlp(), mlp()] for _ in range(2)]
    ours = run(lambda *given: loop(True, *given))
    models = [[mlp(), mlp()] for _ in range(2)]
    require_close(ours, run(lambda *given: loop(False, *given)), 1e-9)


def test_ranks_whose_backwards_reach_two_models_in_different_orders() -> None:
    """To wait for averages in the hook of a model's last bucket would be to wait for ever."""

    def loop(rank: int, session: Session, _: dist.ProcessGroup) -> list[torch.Tensor]:
        groups = [process_group(store, rank, 2) for store in stores]
        ddps = [DistributedDataParallel(model, process_group=group) for model, group in zip(models[rank], groups)]
        for ddp in ddps:
            ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        outputs = [ddp(batch(rank, 0)) for ddp in ddps[:: 1 - 2 * rank]]  # one step: in the next DDP itself waits for others
        (outputs[0] * outputs[1]).mean().backward()
        return [parameter.grad for ddp in ddps for parameter in ddp.parameters()]

    stores = [dist.HashStore(), dist.HashStore()]
    models = [[mlp(), mlp()] for _ in range(2)]
    joint = mlp(), mlp()
    inputs = torch.cat([batch(rank, 0) for rank in range(2)])
    (joint[0](inputs) * joint[1](inputs)).mean().backward()
    expected = [parameter.grad for model in joint for parameter in model.parameters()]
    for gradients in run(loop):
        for ours, theirs in zip(gradients, expected, strict=True):
            assert theirs is not None
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_every_parameter_is_a_tensor_and_front_layers_come_first() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> list[str]:
        registered: list[str] = []
        session.on_register(lambda _, manifest: registered.extend(spec.name for spec in manifest.tensors))
        cs.CommHookState(DistributedDataParallel(mlp(), process_group=group), session=session)
        return registered

    assert run(loop) == [["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]] * 2


def test_detached_ddp_averages_by_itself() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> Weights:
        ddp = DistributedDataParallel(models[rank], process_group=group)
        state = cs.CommHookState(ddp, session=session)
        ddp.register_comm_hook(state, cs.comm_hook)
        train(CASES["one bucket"], rank, ddp, models[rank])
        state.detach()
        session.close()
        return train(CASES["one bucket"], rank, ddp, models[rank])

    def plain(rank: int, session: Session, group: dist.ProcessGroup) -> Weights:
        ddp = DistributedDataParallel(models[rank], process_group=group)
        train(CASES["one bucket"], rank, ddp, models[rank])
        return train(CASES["one bucket"], rank, ddp, models[rank])

    models = [mlp(), mlp()]
    ours = run(loop)
    models = [mlp(), mlp()]
    require_close(ours, run(plain), 1e-9)


def test_a_model_that_is_dropped_is_collected() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> weakref.ref[nn.Module]:
        ddp = DistributedDataParallel(models.pop(), process_group=group)
        ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        mean_square(ddp, batch(rank, 0), 0).backward()
        return weakref.ref(ddp.module)

    models = [mlp(), mlp()]
    dropped = run(loop)
    gc.collect()
    assert [model() for model in dropped] == [None, None]


# --- what cannot be done is named ---


def messages(loop: RankLoop, kind: type[Exception], world_size: int = 2) -> list[str]:
    """What ``loop`` raises on each rank."""

    def caught(rank: int, session: Session, group: dist.ProcessGroup) -> str:
        with pytest.raises(kind) as raised:
            loop(rank, session, group)
        assert raised.type is kind
        return str(raised.value)

    return run(caught, world_size)


def backward(ddp: nn.Module, rank: int, step: int = 0) -> None:
    mean_square(ddp, batch(rank, step), step).backward()


def refused(ddp: nn.Module, rank: int, kind: type[Exception]) -> str:
    """The message of what backward raises, without the error: its traceback would keep the model."""
    try:
        backward(ddp, rank)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def test_models_that_differ_in_names_only() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        model = nn.Sequential()
        model.add_module(f"layer{rank}", nn.Linear(4, 2))
        cs.CommHookState(DistributedDataParallel(model, process_group=group), session=session)

    wanted = "tensor 0 is 'layer0.weight' float32[2, 4] on rank 0 but 'layer1.weight' float32[2, 4] on rank 1"
    assert messages(loop, ManifestMismatch) == [wanted] * 2


def test_a_peer_that_ends_within_training() -> None:
    """The error is the session's own, raised by backward."""

    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> str:
        ddp = DistributedDataParallel(models[rank], process_group=group, bucket_cap_mb=TINY_BUCKETS)
        ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        if rank == 1:
            backward(ddp, rank)
            backward(ddp, rank)  # when it began, DDP agreed on new buckets over its own group
            session.abort("it had enough")
            return ""
        with pytest.raises(TransportError) as raised:
            train(CASES["tiny buckets"], rank, ddp, models[rank])
        session.abort("after that")
        return str(raised.value)

    models = [mlp(), mlp()]
    assert run(loop)[0] == "rank 1 ended: it had enough"


def test_other_models() -> None:
    with pytest.raises(ConfigError) as raised:
        cs.CommHookState(mlp())  # type: ignore[arg-type]
    assert str(raised.value) == "the hook is for a DistributedDataParallel, not for a Sequential"


def test_a_process_group_of_some_ranks() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        alone = process_group(dist.HashStore(), 0, 1)
        cs.CommHookState(DistributedDataParallel(mlp(), process_group=alone), session=session)

    wanted = "the process group of this DistributedDataParallel has 1 ranks, but the job 2; gradients are averaged over all"
    assert messages(loop, UnsupportedError) == [wanted] * 2


def test_a_type_that_is_not_averaged() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        model = nn.Linear(4, 2, dtype=torch.complex64)
        cs.CommHookState(DistributedDataParallel(model, process_group=group), session=session)

    wanted = (
        "parameter 'weight' is torch.complex64, torch.strided; only dense gradients of torch.float16, torch.bfloat16, "
        "torch.float32, torch.float64 can be averaged"
    )
    assert messages(loop, UnsupportedError) == [wanted] * 2


def test_sparse_gradients() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(nn.Embedding(5, 3, sparse=True), process_group=group)
        ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        ddp(torch.tensor([1, 2])).sum().backward()

    wanted = "the gradient of 'weight' is torch.sparse_coo; only dense ones are averaged"
    assert messages(loop, UnsupportedError) == [wanted] * 2


def test_a_parameter_unfrozen_after_ddp_was_made() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        model = models[rank]
        ddp = DistributedDataParallel(model, process_group=group)
        model.requires_grad_(True)
        ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        backward(ddp, rank)

    models = [frozen(), frozen()]
    wanted = (
        "parameter '2.weight' and 1 more: not averaged by DistributedDataParallel, since it did not require a gradient when "
        "that was made"
    )
    assert messages(loop, UnsupportedError) == [wanted] * 2


def test_a_parameter_frozen_for_the_state_only() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        model = models[rank]
        ddp = DistributedDataParallel(model, process_group=group)
        model[2].requires_grad_(False)
        ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        model[2].requires_grad_(True)
        backward(ddp, rank)

    models = [mlp(), mlp()]
    wanted = (
        "parameter '2.weight' is averaged by DistributedDataParallel, but did not require a gradient when CommHookState was "
        "made, or belongs to another model"
    )
    assert messages(loop, UnsupportedError) == [wanted] * 2


def test_after_a_backward_that_was_broken_off_ddp_is_made_anew() -> None:
    def broken(gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    def wrap(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
        return DistributedDataParallel(model, process_group=group, bucket_cap_mb=TINY_BUCKETS)

    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> tuple[str, Weights]:
        model = models[rank]
        ddp = wrap(model, group)
        state = cs.CommHookState(ddp, session=session)
        ddp.register_comm_hook(state, cs.comm_hook)
        backward(ddp, rank, 0)  # then DDP builds its buckets anew, tiny ones
        handle = model[0].weight.register_hook(broken)
        refused(ddp, rank, ZeroDivisionError)
        handle.remove()
        assert "Expected to have finished reduction in the prior iteration" in refused(ddp, rank, RuntimeError)
        del ddp
        gc.collect()
        ddp = wrap(model, group)
        ddp.register_comm_hook(state, cs.comm_hook)
        told = refused(ddp, rank, UnsupportedError)
        del ddp
        gc.collect()
        ddp = wrap(model, group)
        ddp.register_comm_hook(cs.CommHookState(ddp, session=session), cs.comm_hook)
        return told, train(CASES["tiny buckets"], rank, ddp, model)

    models = [mlp(), mlp()]
    told, ours = zip(*run(loop))
    assert told == ("this CommHookState belongs to a DistributedDataParallel that is gone; make one for each",) * 2
    require_close(list(ours), train_ddp(CASES["tiny buckets"], 2, hooked=False), 1e-9)


def test_a_hook_that_calls_twice() -> None:
    def twice(state: cs.CommHookState, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        cs.comm_hook(state, bucket)
        return cs.comm_hook(state, bucket)

    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=group)
        ddp.register_comm_hook(cs.CommHookState(ddp, session=session), twice)
        backward(ddp, rank)

    told = (
        "the first bucket came again before the averages of step 0 were used: backward was broken off, or the hook was called"
    )
    assert messages(loop, UnsupportedError) == [f"{told} twice"] * 2


def test_a_reducer_without_buckets() -> None:
    def loop(rank: int, session: Session, group: dist.ProcessGroup) -> None:
        ddp = DistributedDataParallel(mlp(), process_group=group)
        weight = ddp.module[0].weight
        cs.comm_hook(cs.CommHookState(ddp, session=session), (torch.zeros_like(weight), weight))  # type: ignore[arg-type]

    wanted = "a backward compiled with optimize_ddp='python_reducer' has no buckets; use another mode"
    assert messages(loop, UnsupportedError) == [wanted] * 2


# --- real processes ---


def test_a_real_job(tmp_path: Path) -> None:
    """Uneven inputs, for which DDP wants a process group of the process, and a rank that is killed."""
    command = [sys.executable, "-m", "tests.plugins.torch.ddp_rank", str(tmp_path / "store")]
    options = ("--partition", "64", "--credit", "128", "--fail-after", "100")  # only a broken connection can tell at once
    code, out, err = run_job("-n", "2", *options, "--", *command, patient=True, imports=warm.TORCH)
    lines = out.splitlines()
    for rank in range(2):
        assert f"rank {rank}: join equals DDP" in lines, out + err
        divides = "divides by the ranks that still have data; averages are over all"
        assert f"rank {rank}: UnsupportedError: join(divide_by_initial_world_size=False) {divides}" in lines, out + err
    assert any(line.startswith("rank 0: PeerLost: rank 1") for line in lines), out + err
    assert lines[-1] == "rank 0: at once"
    assert code == 128 + signal.SIGKILL
