"""torch.compile, wherever it is put: compiled code finds every parameter updated, and waits for no others."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import commsched
from commsched.plugins.torch import ScheduledOptimizer, compiled, marked

from .loops import loop as loops
from .loops.loop import Data, Loop, batch, mlp, require_close, require_plain, run, train

TOP = Path(__file__).parents[3]
STEPS = 4
Step = Callable[[int], object]
#: From data, model and optimizer a function that makes one step of training, compiled or not.
MakeStep = Callable[[Data, Any, Any, Callable[..., Any]], Step]


def kernels(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    def call(*arguments: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return graph(*arguments)

    return make_boxed_func(call)


#: As quick as eager, but reads tensors as generated kernels do: it asks nobody.
KERNELS = aot_autograd(fw_compiler=kernels, bw_compiler=kernels)


class OfItsThread(ScheduledOptimizer):
    """Ranks are threads here: what one compiles is no concern of the others."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._thread = threading.get_ident()
        super().__init__(*args, **options)

    def _before_compiling(self) -> None:
        if threading.get_ident() == self._thread:
            super()._before_compiling()


@pytest.fixture(autouse=True)
def nothing_compiled_so_far(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loops, "ScheduledOptimizer", OfItsThread)
    compiled._come_between()
    monkeypatch.setattr(compiled, "_come_between", lambda: None)  # other tests may have compiled something before
    monkeypatch.setattr(compiled, "MIN_FORWARD_PART_BYTES", 0)
    forget()
    yield
    forget()


def forget() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiles(data: Data) -> bool:
    return data.ranks == [0]


def stepping(make_step: MakeStep, *, steps: int = STEPS, **options: Any) -> Loop:
    """A loop of some steps, which rank 0 does compiled. The others do not: the compiler lets one thread in at a time."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        step = make_step(data, model, optimizer, (lambda f: torch.compile(f, **options)) if compiles(data) else lambda f: f)
        for number in range(steps):
            step(number)

    return loop


def _ordinary(data: Data, optimizer: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    def step(number: int) -> None:
        optimizer.zero_grad()
        data.loss(forward, number).backward()
        optimizer.step()

    return step


def _model(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    return _ordinary(data, optimizer, wrap(model))


def _submodule(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    model[0].forward = wrap(model[0].forward)
    return _ordinary(data, optimizer, model)


def _module_in_place(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    if compiles(data):
        model[2].compile(backend=KERNELS)
    return _ordinary(data, optimizer, model)


def _parameters_of_a_closure(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    first, second = model[0], model[2]
    w, b, v, c = first.weight, first.bias, second.weight, second.bias
    return _ordinary(data, optimizer, wrap(lambda x: torch.relu(x @ w.T + b) @ v.T + c))


def _parameters_as_arguments(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    function = wrap(lambda x, w, b, v, c: torch.relu(x @ w.T + b) @ v.T + c)
    return _ordinary(data, optimizer, lambda x: function(x, *model.parameters()))


def _forward_and_backward(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    def forward_backward(number: int, inputs: list[torch.Tensor]) -> None:
        torch.stack([model(x).square().mean() for x in inputs]).mean().backward()

    function = wrap(forward_backward)

    def step(number: int) -> None:
        optimizer.zero_grad()
        function(0, [batch(rank, number) for rank in data.ranks])
        optimizer.step()

    return step


def _whole_step(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    def whole(inputs: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        torch.stack([model(x).square().mean() for x in inputs]).mean().backward()
        optimizer.step()

    function = wrap(whole)
    return lambda number: function([batch(rank, number) for rank in data.ranks])


def _whole_step_that_accumulates(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    def whole(inputs: list[torch.Tensor]) -> None:
        optimizer.zero_grad(set_to_none=False)
        with data.no_sync(optimizer):
            torch.stack([model(x).sin().mean() for x in inputs]).mean().backward()
        torch.stack([model(x).square().mean() for x in inputs]).mean().backward()
        optimizer.step()

    function = wrap(whole)
    return lambda number: function([batch(rank, number) for rank in data.ranks])


def _clipping(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    """Gradients are read, and changed, while their averages are outstanding."""

    def clip() -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, 0.01 / norm)

    function = wrap(clip)

    def step(number: int) -> None:
        optimizer.zero_grad()
        data.loss(model, number).backward()
        function()
        optimizer.step()

    return step


def _whole_step_that_clips(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    def whole(inputs: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        torch.stack([model(x).square().mean() for x in inputs]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    function = wrap(whole)
    return lambda number: function([batch(rank, number) for rank in data.ranks])


def _step_of_the_optimizer(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    optimizer_step = wrap(optimizer.step)

    def step(number: int) -> None:
        optimizer.zero_grad()
        data.loss(model, number).backward()
        optimizer_step()

    return step


def _second_half(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
    """Compiled while updates are outstanding."""
    uncompiled, now_compiled = _ordinary(data, optimizer, model), _ordinary(data, optimizer, wrap(model))
    return lambda number: (now_compiled if number >= STEPS // 2 else uncompiled)(number)


STEP_MAKERS = [
    _model,
    _submodule,
    _module_in_place,
    _parameters_of_a_closure,
    _parameters_as_arguments,
    _forward_and_backward,
    _whole_step,
    _whole_step_that_accumulates,
    _clipping,
    _whole_step_that_clips,
    _step_of_the_optimizer,
    _second_half,
]


@pytest.mark.parametrize("make_step", STEP_MAKERS, ids=lambda make_step: make_step.__name__)
def test_training_equals_that_of_uncompiled_plain_torch(make_step: MakeStep) -> None:
    require_plain(stepping(make_step, backend=KERNELS))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of its own imports
def test_inductor(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # Else it compiles headers, compiles six files to find the best instructions, and starts processes that import PyTorch.
    options = {"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False, "compile_threads": 1}
    require_plain(stepping(_model, steps=3, backend="inductor", options=options))


def by_identity(guards: Any) -> list[bool]:
    return [False for _ in guards]


def test_code_that_looks_at_nothing_finds_every_parameter_updated() -> None:
    """It does not notice that the parameters' class has changed, so nothing else makes it wait."""
    require_plain(stepping(_model, backend=KERNELS, options={"guard_filter_fn": by_identity}))


def test_without_gates_such_code_would_read_stale_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "gate", lambda *_: None)
    monkeypatch.setattr(marked, "marked_twin", lambda _: None)  # kernels that take addresses would see no marks
    with pytest.raises((AssertionError, commsched.CommschedError)):
        require_plain(stepping(_model, backend=KERNELS))


@pytest.mark.parametrize(
    "make_step",
    [_model, _submodule, _parameters_of_a_closure, _parameters_as_arguments, _forward_and_backward, _whole_step],
    ids=lambda make: make.__name__,
)
def test_nothing_is_compiled_anew_in_each_step(make_step: MakeStep) -> None:
    parts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        parts.append(1)
        return graph.forward

    def after(steps: int) -> int:
        parts.clear()
        forget()
        run(stepping(make_step, steps=steps, backend=count))
        return len(parts)

    assert after(2) == after(6) > 0


def test_what_was_compiled_before_the_optimizer_was_wrapped_finds_every_parameter_updated() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        wrapped = torch.compile(model, backend=KERNELS) if compiles(data) else model
        _ordinary(data, optimizer, wrapped)(0)
        if len(data.ranks) == 1:
            optimizer.detach()
        again = data.scheduled(torch.optim.SGD(model.parameters(), lr=0.05), model)
        for number in range(1, STEPS):
            _ordinary(data, again, wrapped)(number)

    require_plain(loop)


def test_what_was_compiled_before_commsched_was_used_finds_every_parameter_updated_and_step_does_not_wait() -> None:
    command = [sys.executable, "-m", "tests.plugins.torch.compiled_first"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


def test_what_is_compiled_after_the_compiler_was_reset_finds_every_parameter_updated() -> None:
    def make_step(data: Data, model: Any, optimizer: Any, wrap: Callable[..., Any]) -> Step:
        if compiles(data):
            torch._dynamo.reset()
        return _second_half(data, model, optimizer, wrap)

    require_plain(stepping(make_step, backend=KERNELS, options={"guard_filter_fn": by_identity}))


def test_neither_uncompiled_nor_compiled_training_waits_in_step() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> tuple[str | None, int]:
        stepping(_model, backend=KERNELS)(data, model, optimizer)
        return optimizer._why_step_waits, len(optimizer._pending)

    assert run(loop) == [(None, 4), (None, 4)]


def test_a_whole_step_as_one_graph_is_refused_by_the_compiler() -> None:
    with pytest.raises((torch._dynamo.exc.Unsupported, commsched.TransportError), match="ScheduledOptimizer"):
        run(stepping(_whole_step, backend="eager", fullgraph=True))


def test_a_model_as_one_graph() -> None:
    require_plain(stepping(_model, backend=KERNELS, fullgraph=True))


class Watcher:
    def __init__(self) -> None:
        self.saw: list[bool] = []
        self.graphs: list[int] = []

    def before_compiling(self) -> None:
        self.saw.append(torch.compiler.is_compiling())

    def graph_made(self, tensors: Sequence[torch.Tensor], why: str | None, reads_gradients: bool) -> bool:
        self.graphs.append(len(tensors))
        return False


def test_whoever_watches_is_called_before_each_compilation_as_if_there_were_none() -> None:
    """torch's optimizers round otherwise while something compiles."""
    watcher, gone = Watcher(), Watcher()
    compiled.watch_compiler(watcher.before_compiling, watcher.graph_made)
    compiled.watch_compiler(gone.before_compiling, gone.graph_made)
    seen = gone.saw
    del gone
    function = torch.compile(lambda x: x + 1, backend="eager")
    require_close(function(torch.ones(2)), torch.full((2,), 2.0))
    require_close(function(torch.ones(2, 2)), torch.full((2, 2), 2.0))
    function(torch.ones(2))
    assert watcher.saw == [False, False]
    assert watcher.graphs == [1, 1]
    assert seen == []


def test_a_sequence_of_models() -> None:
    """Each optimizer is told, and each of them only by its own model."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        torch.manual_seed(5)
        other = mlp()
        others = data.scheduled(loops.sgd(other), other)  # rounds alike while a rank that is another thread compiles
        forward = torch.compile(model, backend="eager") if compiles(data) else model
        for number in range(3):
            train(data, other, others, 1, number)
            _ordinary(data, optimizer, forward)(number)

    require_plain(loop)
