"""One rank of a job that trains each case twice, with Accelerate's own accelerator and with ours: accelerate_rank.py OUT.

Saves as OUT.<rank>, for each case, what both have at the end; and the messages of what is refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commsched
from commsched.plugins.accelerate import Accelerator
from commsched.plugins.torch import ScheduledOptimizer
from tests.plugins.shared_directory import shared_directory

Values = dict[str, torch.Tensor]
MakeAccelerator = Callable[..., Any]


def rank() -> int:
    return int(torch.distributed.get_rank())


def network(seed: int = 0, width: int = 6) -> nn.Module:
    """Another one on each rank: it is rank 0's that counts."""
    torch.manual_seed(10 * rank() + seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, width))


def loader(batches: int = 5) -> DataLoader[Any]:
    """``batches`` of each rank, shuffled."""
    numbers = torch.Generator().manual_seed(1)
    rows = batches * 2 * 4
    data = TensorDataset(torch.randn(rows, 6, generator=numbers), torch.randn(rows, 6, generator=numbers))
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


def weights(*models: nn.Module) -> Values:
    return {
        f"{number}.{name.removeprefix('module.')}": value.detach().clone()
        for number, model in enumerate(models)
        for name, value in model.state_dict().items()
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for model in models for parameter in model.parameters()], 0.01)


def step(accelerator: Any, model: nn.Module, optimizer: Any, batch: list[torch.Tensor]) -> torch.Tensor:
    """One step, and this rank's loss."""
    inputs, labels = batch
    loss = nn.functional.mse_loss(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# --- cases: train, and return what is to be equal ---


class Tracker(GeneralTracker):  # type: ignore[misc]
    """Keeps what it is told."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, Any]] = []

    @property
    def tracker(self) -> Any:
        return self.told

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing is stored."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.told.append(values)


def as_documented(make: MakeAccelerator) -> Values:
    tracker = Tracker()
    accelerator = make(cpu=True, log_with=tracker)
    accelerator.init_trackers("a project")
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    losses = []
    for batch in batches:
        losses.append(accelerator.gather(step(accelerator, model, optimizer, batch)))
        scheduler.step()
    accelerator.log({"loss": 1.0}, step=5)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        [told] = tracker.told
        assert told["loss"] == 1.0
        assert ("commsched/step_seconds" in told) == getattr(accelerator, "is_scheduled", False)
    return {
        **weights(accelerator.unwrap_model(model)),
        "losses": torch.cat(losses),
        "lr": torch.tensor(scheduler.get_last_lr()),
        "norm": torch.stack([parameter.detach().norm() for parameter in model.parameters()]),
    }


def accumulated_and_clipped(make: MakeAccelerator) -> Values:
    """Seven batches in threes: the last one is alone."""
    accelerator = make(cpu=True, gradient_accumulation_steps=3)
    model = network()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    batches, model, scheduler, optimizer = accelerator.prepare(loader(7), model, scheduler, optimizer)
    norms = []
    for inputs, labels in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert len(norms) == 3
    return {
        **weights(accelerator.unwrap_model(model)),
        "norms": torch.stack(norms),
        "lr": torch.tensor(scheduler.get_last_lr()),
    }


def no_sync_by_hand(make: MakeAccelerator) -> Values:
    accelerator = make(cpu=True)
    model = network()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(4))
    for number, (inputs, labels) in enumerate(batches):
        if number % 2 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
            continue
        accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return weights(accelerator.unwrap_model(model))


def averaged_each_backward(make: MakeAccelerator) -> Values:
    """Accumulation that averages each time, as asked for; and two backward passes after two forward passes."""
    accelerator = make(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch=True))
    model = network()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(4))
    for inputs, labels in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    inputs, labels = next(iter(batches))
    with accelerator.no_sync(model):
        losses = [nn.functional.mse_loss(model(half), labels[:2]) for half in inputs.split(2)]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return weights(accelerator.unwrap_model(model))


def optimizer_first_in_several_calls(make: MakeAccelerator) -> Values:
    accelerator = make(cpu=True)
    raw = network()
    optimizer = accelerator.prepare(sgd(raw))
    batches = accelerator.prepare(loader())
    model = accelerator.prepare_model(raw)
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3))
    for batch in batches:
        step(accelerator, model, optimizer, batch)
        scheduler.step()
    return weights(accelerator.unwrap_model(model))


def two_models_of_one_optimizer(make: MakeAccelerator) -> Values:
    accelerator = make(cpu=True, gradient_accumulation_steps=2)
    first, second = network(1), network(2)
    optimizer, second, first, batches = accelerator.prepare(adamw(first, second), second, first, loader(4))
    for batch in batches:
        with accelerator.accumulate(first, second):
            inputs, labels = batch
            accelerator.backward(nn.functional.mse_loss(second(first(inputs)), labels))
            optimizer.step()
            optimizer.zero_grad()
    return weights(accelerator.unwrap_model(first), accelerator.unwrap_model(second))


def two_optimizers_of_one_model(make: MakeAccelerator) -> Values:
    """One of them skips a step, with its own scheduler and not with that of the other, which is prepared later."""
    accelerator = make(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = network()
    assert isinstance(model, nn.Sequential)
    front, back = torch.optim.SGD(model[:2].parameters(), 0.1), torch.optim.Adam(model[2:].parameters(), 0.01)
    slow = torch.optim.lr_scheduler.StepLR(front, 3)
    decay = torch.optim.lr_scheduler.ExponentialLR(back, 0.9)
    last = model[4]
    model, front, back, decay, batches = accelerator.prepare(model, front, back, decay, loader())
    slow = accelerator.prepare(slow)
    for number, (inputs, labels) in enumerate(batches):
        loss = nn.functional.mse_loss(model(inputs), labels)
        if number == 2 and accelerator.process_index == 1:
            loss = loss + float("inf") * last.bias.sum()
        accelerator.backward(loss)
        for each in (front, back, slow, decay):
            each.step()
        assert (front.step_was_skipped, back.step_was_skipped) == (False, number == 2)
        front.zero_grad()
        back.zero_grad()
    return {**weights(accelerator.unwrap_model(model)), "lr": torch.tensor(slow.get_last_lr() + decay.get_last_lr())}


def overflow_on_one_rank(make: MakeAccelerator) -> Values:
    """Gradient scaling: a step that overflows is skipped on all ranks, and its scheduler with it."""
    accelerator = make(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model = network()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
    skipped = []
    for number, (inputs, labels) in enumerate(batches):
        loss = nn.functional.mse_loss(model(inputs), labels)
        if number == 2 and accelerator.process_index == 1:
            loss = loss * float("inf")
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, False, True, False, False]
    return {
        **weights(accelerator.unwrap_model(model)),
        "scale": torch.tensor(accelerator.scaler.get_scale()),
        "lr": torch.tensor(scheduler.get_last_lr()),
    }


def autocast(make: MakeAccelerator) -> Values:
    AcceleratorState._reset_state()  # its mixed precision is that of the first accelerator
    accelerator = make(cpu=True, mixed_precision="bf16")
    model = network()
    model, optimizer, batches = accelerator.prepare(model, adamw(model), loader())
    for batch in batches:
        step(accelerator, model, optimizer, batch)
    AcceleratorState._reset_state()
    return weights(accelerator.unwrap_model(model))


def compiled(make: MakeAccelerator) -> Values:
    AcceleratorState._reset_state()
    accelerator = make(cpu=True, dynamo_backend="eager", gradient_accumulation_steps=2)
    model = network()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(4))
    for inputs, labels in batches:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    AcceleratorState._reset_state()
    return weights(accelerator.unwrap_model(model, keep_torch_compile=False))


def resumed(make: MakeAccelerator) -> Values:
    """Save in the middle, go on with new objects; the loader begins anew."""

    def prepare(seed: int) -> tuple[Any, ...]:
        accelerator = make(cpu=True)
        model = network(seed)
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return accelerator, *accelerator.prepare(model, optimizer, loader(3), scheduler)

    def train(accelerator: Any, model: Any, optimizer: Any, batches: Any, scheduler: Any) -> None:
        for batch in batches:
            step(accelerator, model, optimizer, batch)
            scheduler.step()

    with shared_directory() as directory:
        interrupted = prepare(0)
        train(*interrupted)
        interrupted[0].save_state(directory)
        interrupted[0].wait_for_everyone()
        going_on = prepare(5)
        going_on[0].load_state(directory)
        train(*going_on)
    return {
        **weights(interrupted[0].unwrap_model(interrupted[1])),
        **weights(nn.Module(), going_on[0].unwrap_model(going_on[1])),
    }


def without_a_prepared_optimizer(make: MakeAccelerator) -> Values:
    """Gradients are averaged even so, and stay in ``.grad``: of a whole model, then of a part of it."""
    accelerator = make(cpu=True)
    model, batches = accelerator.prepare(network(), loader(6))
    optimizer = sgd(model)
    norms = []
    for number, (inputs, labels) in enumerate(batches):
        with accelerator.no_sync(model) if number % 3 == 1 else nullcontext():
            accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
        if number % 3 != 1:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
    return {**weights(accelerator.unwrap_model(model)), "norms": torch.stack(norms)}


def a_part_without_a_prepared_optimizer(make: MakeAccelerator) -> Values:
    accelerator = make(cpu=True)
    plain = network()
    head = sgd(plain[4])  # type: ignore[index]
    rest = sgd(plain[:4])  # type: ignore[index]
    model, head, batches = accelerator.prepare(plain, head, loader(4))
    for number, (inputs, labels) in enumerate(batches):
        accelerator.backward(nn.functional.mse_loss(model(inputs), labels))
        for optimizer in (head, rest):
            optimizer.step()
            optimizer.zero_grad()
        if number == 1:
            rest.param_groups.clear()
            head.add_param_group({"params": list(plain[:4].parameters()), "lr": 0.05})  # type: ignore[index]
    return weights(accelerator.unwrap_model(model))


def uneven_inputs(make: MakeAccelerator) -> Values:
    """Nine batches of two processes. Accelerate joins no inputs on CPUs, so theirs are the join of DistributedDataParallel."""
    accelerator = make(cpu=True)
    model = network()
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(9 * 4, 6, generator=numbers), torch.randn(9 * 4, 6, generator=numbers))
    model, optimizer, batches = accelerator.prepare(model, sgd(model), DataLoader(data, batch_size=4))
    for _ in range(2):
        is_theirs = isinstance(model, nn.parallel.DistributedDataParallel)
        batches.batch_sampler.even_batches = not is_theirs
        with model.join() if is_theirs else accelerator.join_uneven_inputs([model], even_batches=False):
            count = sum(1 for batch in batches if step(accelerator, model, optimizer, batch) is not None)
        assert count == 5 - rank(), count
        assert batches.batch_sampler.even_batches is not is_theirs
        optimizer.optimizer.state.clear()  # DistributedDataParallel leaves momenta different
    return weights(accelerator.unwrap_model(model))


def trained_twice(make: MakeAccelerator) -> Values:
    """With an optimizer that goes on, then with a new one and another accelerator; and a copy that is not trained."""
    accelerator = make(cpu=True)
    raw = network()
    start = accelerator.prepare(copy.deepcopy(raw))
    model, optimizer, batches = accelerator.prepare(raw, sgd(raw), loader(2))
    for batch in batches:
        step(accelerator, model, optimizer, batch)
    first, begun = weights(accelerator.unwrap_model(model)), weights(accelerator.unwrap_model(start))
    accelerator.free_memory()
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(2))
    for batch in batches:
        step(accelerator, model, optimizer, batch)
    later = make(cpu=True)
    model, optimizer, batches = later.prepare(accelerator.unwrap_model(model), adamw(raw), loader(2))
    for batch in batches:
        step(later, model, optimizer, batch)
    return {
        **{f"first {name}": value for name, value in first.items()},
        **{f"begun {name}": value for name, value in begun.items()},
        **weights(raw),
    }


CASES = {
    case.__name__: case
    for case in (
        as_documented,
        accumulated_and_clipped,
        no_sync_by_hand,
        averaged_each_backward,
        optimizer_first_in_several_calls,
        two_models_of_one_optimizer,
        two_optimizers_of_one_model,
        overflow_on_one_rank,
        autocast,
        resumed,
        trained_twice,
        without_a_prepared_optimizer,
        a_part_without_a_prepared_optimizer,
        uneven_inputs,
        compiled,  # the last: once something is compiled, updates of all optimizers wait for their averages
    )
}


# --- what is refused ---


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except commsched.CommschedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals() -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    said = {}

    alone = accelerator.prepare(sgd(network()))
    said["an optimizer without its model"] = refused(alone.step)

    model = accelerator.prepare(network())
    head = accelerator.prepare(sgd(model[4]))
    accelerator.prepare(torch.optim.SGD(model[4].parameters(), 0.1))
    said["an optimizer that another one has replaced"] = refused(head.step)
    stranger = accelerator.join_uneven_inputs([network()], even_batches=False)
    said["uneven inputs of a model that is not prepared"] = refused(stranger.__enter__)
    accelerator.free_memory()
    of_the_user = ScheduledOptimizer(sgd(model), model)
    said["an optimizer that is scheduled already"] = refused(lambda: accelerator.prepare(of_the_user))

    hook = DistributedDataParallelKwargs(comm_hook="bf16")
    said["a communication hook"] = refused(lambda: Accelerator(cpu=True, kwargs_handlers=[hook]))
    of_another_class = type("Special", (accelerate.Accelerator,), {})(cpu=True)
    said["another class"] = refused(lambda: Accelerator.adopt(of_another_class))
    sharded = accelerate.Accelerator(cpu=True)
    sharded.state.distributed_type = DistributedType.FSDP  # as Accelerate sets it where there are GPUs
    said["FSDP"] = refused(lambda: Accelerator.adopt(sharded))
    AcceleratorState._reset_state()
    narrow = accelerate.Accelerator(cpu=True)
    narrow.state._mixed_precision = "fp8"  # which needs a library that is for GPUs only
    said["8-bit floats"] = refused(lambda: Accelerator.adopt(narrow))
    AcceleratorState._reset_state()
    return said


def main() -> None:
    results: dict[str, Any] = {}
    accelerate.Accelerator(cpu=True)  # the process group
    for name, case in CASES.items():
        results[name] = {"theirs": case(accelerate.Accelerator), "ours": case(Accelerator)}
    results["refusals"] = refusals()
    commsched.shutdown()
    commsched.init(disable=True)
    results["disabled"] = {"theirs": as_documented(accelerate.Accelerator), "ours": as_documented(Accelerator)}
    torch.save(results, f"{sys.argv[1]}.{rank()}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
