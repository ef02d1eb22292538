"""What is needed beside the model: counted in calls and bytes, not measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import commsched
from commsched import Session
from commsched.plugins.torch import initial_state, slot

from .loops.loop import Data, mlp, require_close, require_plain, run, sgd


class Mixed(nn.Module):
    """Tensors of many types and strides, frozen ones too, larger and smaller than a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.frozen = nn.Parameter(torch.randn(7, 5), requires_grad=False)
        self.last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        for name, buffer in {
            "count": torch.tensor(3),
            "mask": torch.rand(11) > 0.5,
            "wave": torch.randn(9, dtype=torch.complex64),
            "conjugate": torch.randn(3, dtype=torch.complex128).conj(),
            "transposed": torch.randn(6, 5, dtype=torch.bfloat16).t(),
            "nothing": torch.empty(0),
            "expanded": torch.randn(1, 3).expand(3, 3),
            "spread": torch.randn(3, 2).t().expand(4, 2, 3),
            "repeated": torch.randn(1).expand(4),
            "single": torch.randn(()).expand(1),
            "special": torch.tensor([[0.0, -0.0, torch.nan]]).expand(3, 3),
            "windows": torch.randn(9).unfold(0, 3, 1).expand(2, 7, 3),
        }.items():
            self.register_buffer(name, buffer)


def test_an_expanded_buffer_takes_the_memory_of_its_distinct_elements() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        module = nn.Linear(2, 2)
        module.register_buffer("mask", torch.full((1, 2, 1), 1.0 + data.ranks[0]).expand(2**20, 2, 2**20))
        data.scheduled(sgd(module), module)
        return module.mask[7, :, 7].tolist()

    assert run(loop, model=lambda: nn.Linear(1, 1)) == [[1.0, 1.0], [1.0, 1.0]]


def test_expanded_state_of_the_optimizer_is_broadcast() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        module = nn.Linear(2, 2)
        plain = sgd(module)
        if data.ranks[0] == 0:
            plain.state[module.weight] = {"scale": torch.tensor(7.0).expand(2, 2), "other": torch.full((3,), 5.0)}
        data.scheduled(plain, module)
        return [plain.state[module.weight][name].tolist() for name in ("scale", "other")]

    assert run(loop, model=lambda: nn.Linear(1, 1)) == [[[[7.0, 7.0], [7.0, 7.0]], [5.0, 5.0, 5.0]]] * 2


def test_a_buffer_that_is_expanded_on_one_rank_only_is_named() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module = nn.Linear(2, 2)
        module.register_buffer("mask", torch.zeros(1, 2).expand(2, 2) if data.ranks[0] else torch.zeros(2, 2))
        data.scheduled(sgd(module), module)

    said = r"buffer 'mask' torch.float32\[2, 2\] on rank 0 but buffer 'mask' torch.float32\[2, 2\] expanded from \[1, 2\] on"
    with pytest.raises(commsched.CommschedError, match=said):
        run(loop, model=lambda: nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("make", "strides"),
    [
        (lambda: torch.zeros(5).unfold(0, 3, 1), r"\[1, 1\]"),
        (lambda: torch.zeros(9).as_strided((3, 3), (1, 2)), r"\[1, 2\]"),
        (lambda: torch.zeros(7).as_strided((3, 3), (2, 1)), r"\[2, 1\]"),
        (lambda: torch.zeros(3, 3).T, None),
        (lambda: torch.zeros(6, 6)[::2, ::2], None),
        (lambda: torch.zeros(3, 3, 2)[..., 0], None),
    ],
)
def test_a_buffer_whose_elements_share_memory_on_one_rank_only_is_named(make: Any, strides: str | None) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module = nn.Linear(2, 2)
        module.register_buffer("mask", make() if data.ranks[0] else torch.arange(9.0).reshape(3, 3))
        data.scheduled(sgd(module), module)
        assert module.mask.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]

    if strides is None:
        run(loop, model=lambda: nn.Linear(1, 1))
        return
    named = r"torch.float32\[3, 3\]"
    said = rf"buffer 'mask' {named} on rank 0 but buffer 'mask' {named} of strides {strides}, which may share memory on"
    with pytest.raises(commsched.CommschedError, match=said):
        run(loop, model=lambda: nn.Linear(1, 1))


def test_a_buffer_that_shares_memory_with_another_on_one_rank_only_is_named() -> None:
    """A broadcast to one of them would change the other."""

    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module, base = nn.Linear(2, 2), torch.zeros(6)
        module.register_buffer("first", base[:4] if data.ranks[0] else torch.arange(4.0))
        module.register_buffer("second", base[2:] if data.ranks[0] else torch.arange(4.0))
        data.scheduled(sgd(module), module)

    named = r"buffer 'second' torch.float32\[4\]"
    with pytest.raises(
        commsched.ManifestMismatch, match=rf"{named} on rank 0 but {named} in the memory of buffer 'first' \(8 bytes in"
    ):
        run(loop, model=lambda: nn.Linear(1, 1))


@pytest.mark.parametrize("where", ["on all ranks", "on rank 0"])
def test_other_buffers_that_share_memory_are_broadcast(where: str) -> None:
    """Another rank, such as a new one of an elastic job, may have in several places what rank 0 has in one."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        module, base = nn.Linear(2, 2), torch.arange(6.0) + 7 * data.ranks[0]
        own = where == "on rank 0" and data.ranks[0]
        module.register_buffer("first", base[:4].clone() if own else base[:4])
        module.register_buffer("second", base[2:].clone() if own else base[2:])
        module.register_buffer("windows", base.clone().unfold(0, 2, 1).clone() if own else base.clone().unfold(0, 2, 1))
        data.scheduled(sgd(module), module)
        return [module.first.tolist(), module.second.tolist(), module.windows[3].tolist()]

    assert run(loop, model=lambda: nn.Linear(1, 1)) == [[[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0], [3.0, 4.0]]] * 2


def test_those_that_share_less_than_on_rank_0_are_broadcast_and_those_that_share_more_are_named() -> None:
    def loop(data: Data, model: Any, optimizer: Any, shares_less: bool) -> Any:
        module, matrix = nn.Linear(2, 2), torch.arange(6.0).reshape(3, 2) + data.ranks[0]
        buffers = {"a": matrix[:, 0], "b": matrix[:, 0][:2], "c": matrix[:2, 0]}
        if not shares_less:
            column = matrix[:2, 1]
            buffers = {"a": matrix[:, 0], "b": column, "c": matrix[:2, 1] if data.ranks[0] else column.clone()}
        elif data.ranks[0]:
            buffers["a"] = buffers["a"].clone()
        for name, buffer in buffers.items():
            module.register_buffer(name, buffer)
        data.scheduled(sgd(module), module)
        return [buffer.tolist() for buffer in module.buffers()]

    less = run(partial(loop, shares_less=True), model=lambda: nn.Linear(1, 1))
    assert less == [[[0.0, 2.0, 4.0], [0.0, 2.0], [0.0, 2.0]]] * 2
    with pytest.raises(
        commsched.ManifestMismatch, match=r"buffer 'c' torch.float32\[2\] in the memory of buffer 'b' \(0 bytes in"
    ):
        run(partial(loop, shares_less=False), model=lambda: nn.Linear(1, 1))


@pytest.mark.parametrize("how", ["another place", "other strides"])
def test_buffers_that_share_memory_in_another_way_are_named(how: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module, base = nn.Linear(2, 2), torch.arange(16.0)
        square = base[:9].reshape(3, 3)
        first, second = (base[:4], base[2:6]) if how == "another place" else (square, square.T)
        if data.ranks[0]:
            second = base[1:5] if how == "another place" else square.view(3, 3)
        module.register_buffer("first", first)
        module.register_buffer("second", second)
        data.scheduled(sgd(module), module)

    said = r"buffer 'second' .* in the memory of buffer 'first' \(.* on rank 0 but buffer 'second' .* buffer 'first' \("
    with pytest.raises(commsched.ManifestMismatch, match=said):
        run(loop, model=lambda: nn.Linear(1, 1))


def test_columns_of_one_matrix_share_no_memory() -> None:
    """Rank 0 may have loaded a checkpoint with ``assign=True``, which gives it tensors of its own."""

    def loop(data: Data, model: Any, optimizer: Any) -> Any:
        module, (cos, sin) = nn.Linear(2, 2), (torch.arange(8.0).reshape(2, 4) + data.ranks[0]).chunk(2, dim=1)
        module.register_buffer("cos", cos if data.ranks[0] else cos.clone())
        module.register_buffer("sin", sin if data.ranks[0] else sin.clone())
        data.scheduled(sgd(module), module)
        return [module.cos.tolist(), module.sin.tolist()]

    assert run(loop, model=lambda: nn.Linear(1, 1)) == [[[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]] * 2


@pytest.mark.parametrize("make", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_a_parameter_that_is_such_a_view_is_trained(make: Any) -> None:
    def train(wrap: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        module = nn.Module()
        module.weight = nn.Parameter(make(torch.randn(5, dtype=torch.complex64, generator=generator)))
        optimizer = wrap(sgd(module), module)
        for _ in range(3):
            optimizer.zero_grad()
            (module.weight * module.weight.abs()).real.sum().backward()
            optimizer.step()
        return module.weight.detach().resolve_conj().resolve_neg()

    plain = train(lambda optimizer, module: optimizer)
    for weight in run(lambda data, model, optimizer: train(data.scheduled), model=lambda: nn.Linear(1, 1)):
        torch.testing.assert_close(weight, plain)


def test_the_shape_of_a_buffer_that_differs_is_named() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module = nn.Linear(2, 2)
        module.register_buffer("count", torch.zeros((), dtype=torch.int64) if data.ranks[0] == 0 else torch.zeros(2))
        data.scheduled(sgd(module), module)

    with pytest.raises(commsched.CommschedError, match=r"buffer 'count' torch.int64\[\].*buffer 'count' torch.float32\[2\]"):
        run(loop, model=lambda: nn.Linear(1, 1))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_state_that_would_have_to_be_broadcast_is_refused_by_name() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module = nn.Linear(2, 2)
        plain = sgd(module)
        plain.state[module.weight]["scales"] = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
        data.scheduled(plain, module)

    said = "the optimizer's state 'scales' holds a torch.quint8 quantized tensor; only dense tensors with values"
    with pytest.raises(commsched.UnsupportedError, match=said):
        run(loop, model=lambda: nn.Linear(1, 1))


def test_a_buffer_that_is_sparse_on_one_rank_only_is_named_with_its_shape() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module = nn.Linear(2, 2)
        module.register_buffer("adj", torch.eye(3) if data.ranks[0] else torch.eye(3).to_sparse())
        data.scheduled(sgd(module), module)

    said = r"'adj' torch.float32 torch.sparse_coo\[3, 3\] on rank 0 but buffer 'adj' torch.float32\[3, 3\] on"
    with pytest.raises(commsched.ManifestMismatch, match=said):
        run(loop, model=lambda: nn.Linear(1, 1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_parameter_is_refused_by_name() -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        module = nn.Linear(2, 2)
        module.ragged = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        data.scheduled(sgd(module), module)

    with pytest.raises(commsched.UnsupportedError, match="parameter 'ragged' is a nested tensor; only dense gradients"):
        run(loop, model=lambda: nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda rank: torch.eye(3).to_sparse(),
            "buffer 'adj' is a torch.float32 torch.sparse_coo tensor, which cannot be broadcast",
        ),
        (
            lambda rank: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "buffer 'adj' is a torch.float32 nested tensor, which cannot be broadcast",
        ),
        (
            lambda rank: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            "buffer 'adj' is a torch.quint8 quantized tensor, which cannot be broadcast",
        ),
        (
            lambda rank: torch.zeros(3, device="meta"),
            "buffer 'adj' is a torch.float32 meta tensor, which cannot be broadcast",
        ),
    ],
    ids=["sparse", "nested", "quantized", "meta"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_buffer_that_cannot_be_broadcast_is_refused_by_name(make: Any, said: str) -> None:
    def loop(data: Data, model: Any, optimizer: Any) -> None:
        rank = data.ranks[0]
        module = nn.Linear(2, 2)
        module.register_buffer("adj", make(rank))
        data.scheduled(sgd(module), module)

    with pytest.raises(commsched.UnsupportedError, match=said):
        run(loop, model=lambda: nn.Linear(1, 1))


@pytest.mark.parametrize("piece_bytes", [30, 2**20])
def test_a_model_of_any_size_is_broadcast_by_pieces(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    broadcast = Session.broadcast

    def counted(self: Session, name: str, data: Any, root: int = 0) -> None:
        sizes.append(len(data))
        broadcast(self, name, data, root)

    def loop(data: Data, model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(data.ranks[0])
        mixed = Mixed()
        data.scheduled(sgd(mixed), mixed)
        return mixed.state_dict()

    monkeypatch.setattr(Session, "broadcast", counted)
    monkeypatch.setattr(initial_state, "PIECE_BYTES", piece_bytes)
    first, second = run(loop, model=lambda: nn.Linear(1, 1))
    total = sum(initial_state.distinct(tensor).nbytes for tensor in first.values())
    assert max(sizes) == min(piece_bytes, total)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=0, atol=0, equal_nan=True)
    require_close(second["last"].stride(), first["last"].stride())


@pytest.mark.parametrize("model_zeros", [False, True], ids=["optimizer.zero_grad", "model.zero_grad"])
def test_zeroed_gradients_stay_in_their_memory(model_zeros: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is made for them, and no copy when backward has added to them."""

    def loop(data: Data, model: Any, optimizer: Any) -> list[torch.Tensor]:
        seen = []
        for step in range(4):
            (model if model_zeros else optimizer).zero_grad(set_to_none=False)
            if step == 2:
                seen += [parameter.grad.clone() for parameter in model.parameters()]  # the updates are in place for this
            loss = data.loss(model, step)
            if step > 1 and len(data.ranks) == 1:
                addresses = {each.address for each in optimizer._exchange.places.slots}
                assert {parameter.grad.data_ptr() for parameter in model.parameters()} == addresses
            loss.backward()
            optimizer.step()
        return seen

    def refuse(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a tensor of zeros is made")

    monkeypatch.setattr(slot.torch, "zeros_like", refuse)
    require_plain(loop, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
