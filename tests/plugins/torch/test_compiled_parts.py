"""The parts of a compiled forward: each waits for its own parameters, whatever the model does and whoever reads besides."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import commsched
from commsched.plugins.torch import compiled, marked
from commsched.plugins.torch.exchange import GradientExchange

from .loops.loop import Data, Loop, batch, require_plain, run, sgd
from .test_compiled import KERNELS, compiles, kernels, nothing_compiled_so_far

__all__ = ["nothing_compiled_so_far"]

# The compiler ignores this warning of its own, but not safely where ranks are threads.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

LAYERS = 6


class Deep(nn.Module):
    """Six layers, each of which is a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(LAYERS))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class ByMethods(Deep):
    """The first use of a weight is a method, before the function that computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(LAYERS))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(torch.mm(x, layer.weight.t()))  # type: ignore[operator,arg-type,union-attr]
        return x


class WithABreak(Deep):
    """The compiler cannot read the middle, where code that is not compiled reads a weight of the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = x + torch.tanh(layer(x))
        torch._dynamo.graph_break()
        x = x * norm_of(self.layers[5])
        for layer in self.layers[3:]:
            x = x + torch.tanh(layer(x))
        return x


@torch.compiler.disable
def norm_of(layer: nn.Module) -> torch.Tensor:
    return layer.weight.norm()  # type: ignore[union-attr,operator]


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.layers[5].weight = self.layers[0].weight


class Checkpointed(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False)  # type: ignore[operator]
        return x


class WithSizes(Deep):
    """Sizes are values of the graph, which cross the borders of parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        for layer in self.layers:
            x = x[: rows - 1].repeat(2, 1)[:rows] + torch.tanh(layer(x)) * rows
        return x / rows**6


class Blocks(Deep):
    """All layers run the same code, which is compiled once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(layer) for layer in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x))


class ChangesParameters(Deep):
    """Each change is of a value that no later part gets from another part, so nothing says when it is made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.no_grad():
                layer.bias.clamp_(-0.05, 0.05)  # type: ignore[union-attr,operator]
            x = x + torch.tanh(layer(x))
        return x


class ChangesAList(Deep):
    """No part may seem to change anything."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with torch.no_grad():
                torch._foreach_clamp_max_([layer.bias], -0.05)  # type: ignore[union-attr,list-item]
            x = x + torch.tanh(layer(x))
        return x


class InModes(Deep):
    """Between the layers, modes of torch are entered and left: some last for a part of the forward, one lasts for all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for index, layer in enumerate(self.layers):
                with torch.set_grad_enabled(index != 2):
                    shift = layer(x).mean()  # has no gradient in one layer
                with torch.inference_mode(index == 3):
                    scale = layer.weight.shape[0]  # type: ignore[union-attr,index]
                each = torch.vmap(layer)(x) if index == 4 else layer(x)
                x = x + torch.tanh(each + shift / scale)
        return x


class ChoosesKernels(Deep):
    """All layers but the first and the last run with a choice of kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.layers[0](x))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for index in range(1, LAYERS - 1):
                x = x + torch.tanh(self.layers[index](x))
        return x + torch.tanh(self.layers[-1](x))


class ChangesAView(Deep):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        view = x[:, :2]
        for index, layer in enumerate(self.layers):
            y = torch.tanh(layer(x.clone()))
            if index % 2:
                x += y
            else:
                view.mul_(1 + 0.1 * y[:, :2])
        return x


def compile_model(data: Data, model: nn.Module, **options: Any) -> Any:
    """Compiled on rank 0 only: ranks are threads, and the compiler lets one in at a time."""
    return torch.compile(model, backend=KERNELS, **options) if compiles(data) else model


def train(data: Data, forward: Any, optimizer: Any, steps: int = 4) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        data.loss(forward, step).backward()
        optimizer.step()
    if len(data.ranks) == 1:
        assert optimizer._why_step_waits is None


def compiled_training(**options: Any) -> Loop:
    return lambda data, model, optimizer: train(data, compile_model(data, model, **options), optimizer)


@pytest.mark.parametrize(
    "make", [Deep, WithABreak, Tied, Checkpointed, ChangesParameters, ChangesAList, InModes], ids=lambda make: make.__name__
)
def test_training_equals_that_of_uncompiled_plain_torch(make: Callable[[], nn.Module]) -> None:
    require_plain(compiled_training(), model=make)


def test_sizes_that_cross_the_borders() -> None:
    require_plain(compiled_training(dynamic=True), model=WithSizes)


def test_a_view_of_any_size_that_is_changed() -> None:
    require_plain(compiled_training(dynamic=True), model=ChangesAView)


def test_as_one_graph() -> None:
    require_plain(compiled_training(fullgraph=True), model=Deep)


def test_in_place() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        if compiles(data):
            model.compile(backend=KERNELS, fullgraph=True)
        train(data, model, optimizer)

    require_plain(loop, model=Deep)


def test_compiled_before_the_optimizer_is_wrapped() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        forward = compile_model(data, model)
        if len(data.ranks) == 1:
            optimizer.detach()
        train(data, forward, data.scheduled(torch.optim.SGD(model.parameters(), lr=0.05), model))

    require_plain(loop, model=Deep)


def test_what_is_compiled_for_other_parameters_first() -> None:
    """Modules of one class share compiled code: a gate looks at what it is given."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        other = copy.deepcopy(model)
        compile_model(data, other)(batch(7)).sum().backward()
        train(data, compile_model(data, model), optimizer)

    require_plain(loop, model=Deep)


def test_blocks_that_share_their_code() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        model.blocks = [compile_model(data, block) for block in model.blocks]
        train(data, model, optimizer)

    require_plain(loop, model=Blocks)


def all_gates_but(index: int) -> Callable[..., None]:
    passed, gate = itertools.count(), compiled.gate

    def other_gates(*tensors: Any) -> None:
        if next(passed) % LAYERS != index:
            gate(*tensors)

    return other_gates


@pytest.mark.parametrize("index", range(LAYERS))
def test_without_one_gate_its_part_reads_stale_parameters(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FORWARD_PARTS", 100)
    monkeypatch.setattr(compiled, "gate", all_gates_but(index))
    monkeypatch.setattr(marked, "marked_twin", lambda _: None)  # kernels that take addresses would see no marks
    monkeypatch.setattr(GradientExchange, "those_there", lambda *_: ())  # else another gate makes the update, too
    with pytest.raises(
        (AssertionError, RuntimeError, commsched.CommschedError), match=r"differs from|since step|by an inplace"
    ):
        require_plain(compiled_training(), model=Deep)


@pytest.mark.parametrize("make", [Deep, ByMethods])
def test_each_part_waits_for_its_own_parameters_and_no_others(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "FORWARD_PARTS", 100)
    monkeypatch.setattr(GradientExchange, "those_there", lambda *_: ())

    def loop(data: Data, model: Any, optimizer: Any) -> list[list[int]]:
        outstanding: list[list[int]] = []

        def recording(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                outstanding[-1].append(LAYERS * len(optimizer._pending) // len(list(model.parameters())))
                return graph(*args)

            return call

        forward = torch.compile(model, backend=recording) if compiles(data) else model
        for step in range(3):
            outstanding.append([])
            optimizer.zero_grad()
            data.loss(forward, step).backward()
            optimizer.step()
        return outstanding

    assert run(loop, model=make)[0] == [[0] * LAYERS, [5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0]]


def test_a_part_begins_with_the_method_that_is_the_first_to_use_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FORWARD_PARTS", 100)
    parts: list[list[str]] = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        def recording(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            parts.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
            return graph

        train(data, torch.compile(model, backend=recording) if compiles(data) else model, optimizer, steps=1)

    run(loop, model=ByMethods)
    assert [part[0] for part in parts] == ["t"] * LAYERS


@pytest.mark.parametrize(("make", "parts"), [(ChangesParameters, LAYERS), (InModes, LAYERS), (ChoosesKernels, 3)])
def test_no_part_begins_in_another_mode_than_the_graph(
    make: Callable[[], nn.Module], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "FORWARD_PARTS", 100)
    monkeypatch.setattr(compiled, "MIN_FORWARD_PART_BYTES", 1)
    has_gradients: list[tuple[bool, bool]] = []

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        def recording(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                before = torch.is_grad_enabled()
                result = graph(*args)
                has_gradients.append((before, torch.is_grad_enabled()))
                return result

            return call

        train(data, torch.compile(model, backend=recording) if compiles(data) else model, optimizer, steps=1)

    run(loop, model=make)
    assert has_gradients == [(True, True)] * parts


def test_gradients_of_a_part_exist_before_the_backward_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "FORWARD_PARTS", 100)

    def loop(data: Data, model: Any, optimizer: Any) -> list[int]:
        made: list[int] = []

        def noting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                made.append(sum(parameter.grad is not None for parameter in model.parameters()))
                return graph(*args)

            return make_boxed_func(call)

        backend = aot_autograd(fw_compiler=kernels, bw_compiler=noting)
        train(data, torch.compile(model, backend=backend) if compiles(data) else model, optimizer, 1)
        return made

    assert run(loop, model=Deep)[0] == [0, 2, 4, 6, 8, 10]


def test_evaluation_and_an_average_of_the_weights_in_between() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        forward, seen = compile_model(data, model), []
        average = copy.deepcopy(model)
        for step in range(3):
            train(data, forward, optimizer, 1)
            if step == 1:
                seen.append(model.layers[2].weight.norm().item())
            with torch.no_grad():
                for mine, its in zip(average.parameters(), model.parameters()):
                    mine.lerp_(its, 0.5)
            with torch.no_grad():
                seen.append(forward(batch(5)))
            seen.append(copy.deepcopy(model.state_dict()))
        return [*seen, [parameter.detach() for parameter in average.parameters()]]

    require_plain(loop, model=Deep)


def test_evaluation_between_steps_that_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without gradients stays whole: it waits for all of its parameters when it begins."""
    monkeypatch.setattr(GradientExchange, "those_there", lambda *_: ())

    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        forward = compile_model(data, model)
        with torch.no_grad():
            forward(batch(5))
        train(data, model, optimizer, 1)
        with torch.no_grad():
            return [forward(batch(5))]

    require_plain(loop, model=Deep)


def test_accumulation() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        forward = compile_model(data, model)
        for step in range(3):
            optimizer.zero_grad()
            with data.no_sync(optimizer):
                data.loss(forward, 3 * step).backward()
            data.loss(forward, 3 * step + 1).backward()
            data.loss(forward, 3 * step + 2).backward()
            optimizer.step()
        train(data, forward, optimizer, 1)

    require_plain(loop, model=Deep)


def test_two_models() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> list[Any]:
        other = copy.deepcopy(model)
        its = data.scheduled(sgd(other), other)
        first, second = compile_model(data, model), compile_model(data, other)
        for step in range(3):
            optimizer.zero_grad()
            its.zero_grad()
            data.mean(lambda rank, step=step: second(first(batch(rank, step))).square().mean()).backward()  # type: ignore[misc]
            optimizer.step()
            its.step()
        return [parameter.detach().clone() for parameter in other.parameters()]

    require_plain(loop, model=Deep)


def test_parameters_that_become_frozen() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        forward = compile_model(data, model)
        train(data, forward, optimizer, 2)
        model.layers[1].requires_grad_(False)
        train(data, forward, optimizer, 2)
        model.layers[1].requires_grad_(True)
        train(data, forward, optimizer, 2)

    require_plain(loop, model=Deep)


def test_the_order_of_first_use_is_that_of_the_graph() -> None:
    class Backwards(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in reversed(range(LAYERS)):
                x = x + torch.tanh(self.layers[index](x))
            return x

    def loop(data: Data, model: Any, optimizer: Any) -> list[str]:
        train(data, compile_model(data, model), optimizer, 1)
        return [slot.name for slot in optimizer._exchange.places.slots]

    names = [f"layers.{index}.{name}" for index in reversed(range(LAYERS)) for name in ("weight", "bias")]
    assert [set(pair) for pair in zip(*[iter(run(loop, model=Backwards)[0])] * 2)] == [
        set(pair) for pair in zip(*[iter(names)] * 2)
    ]


# --- where no gate can be put, step() waits, and says so once ---


def waits(prepare: Callable[[Data, Any, Any], Any]) -> Loop:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        forward = prepare(data, model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            data.loss(forward, step).backward()
            optimizer.step()

    return loop


def _recorded_by_a_cuda_graph(data: Data, model: Any, optimizer: Any) -> Any:
    wrapped = compile_model(data, model)
    if compiles(data):
        wrapped.dynamo_ctx.callback._torchdynamo_orig_backend._torchdynamo_orig_backend._compiler_name = "cudagraphs"
    return wrapped


def _through_other_memory(data: Data, model: Any, optimizer: Any) -> Any:
    alias = model.layers[0].bias.detach()
    return compile_function(data, lambda x: model(x) + 0 * alias.sum())


def compile_function(data: Data, function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend=KERNELS) if compiles(data) else function


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (_recorded_by_a_cuda_graph, "a CUDA graph reads parameters without waiting for their update"),
        (_through_other_memory, "compiled code reads the memory of 'layers.0.bias' by another tensor"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_otherwise_step_waits(prepare: Callable[..., Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "commsched"):
        require_plain(waits(prepare), model=Deep)
    said = [record.message for record in caplog.records if "step() waits" in record.message]
    assert said == [f"{why}: step() waits for all averages from now on"]


def test_if_the_check_of_classes_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def as_torch_does(create: Callable[..., None], builder: Any, guard: Any) -> None:
        create(builder, guard)

    monkeypatch.setattr(compiled, "_match_own_class", as_torch_does)

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        forward = compile_model(data, model)
        for step in range(10):
            optimizer.zero_grad()
            data.loss(forward, step).backward()
            optimizer.step()

    with caplog.at_level(logging.INFO, "commsched"):
        require_plain(loop, model=Deep)
    said = [record.message for record in caplog.records if "step() waits" in record.message]
    assert said == [
        "code is compiled anew in each step while updates are outstanding: step() waits for all averages from now on"
    ]


def test_a_graph_that_cannot_be_split_is_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import distributed

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("not this graph")

    monkeypatch.setattr(distributed.SubmodCompiler, "run", refuse)
    require_plain(compiled_training(), model=Deep)


def test_a_user_who_wants_no_parts_gets_one() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> int:
        parts: list[int] = []

        def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            parts.append(1)
            return KERNELS(graph, inputs)

        with torch._dynamo.config.patch(optimize_ddp=False):
            train(data, torch.compile(model, backend=counting) if compiles(data) else model, optimizer)
        return len(parts)

    assert run(loop, model=Deep) == [1, 0]
