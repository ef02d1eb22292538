"""The process group of torch.distributed in elastic jobs: its calls, between ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commsched.core.errors import ManifestMismatch, TransportError, UnsupportedError
from commsched.plugins.torch.process_group import _SessionGroup
from commsched.session.local import local_sessions
from commsched.session.session import Session

RANKS = 3
TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "not contiguous": torch.arange(6.0, dtype=torch.float64).reshape(2, 3).T,
    "scalar": torch.tensor(7),
    "16 bits": torch.arange(3.0, dtype=torch.bfloat16),
    "truth": torch.tensor([True, False]),
    "one byte": torch.tensor([255, 1], dtype=torch.uint8),
    "empty": torch.zeros(0, 4),
}


def in_threads(call: Callable[[_SessionGroup], Any], allowed: bool = True) -> list[Any]:
    """The result of each rank, or its error."""

    def run(session: Session) -> Any:
        group = _SessionGroup(session)
        group.is_allowed = allowed
        try:
            return call(group)
        except Exception as error:
            session.abort(str(error))
            return error

    sessions = local_sessions(RANKS)
    with ThreadPoolExecutor(RANKS) as threads:
        results = list(threads.map(run, sessions, timeout=60.0))
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(Session.close, [each for each in sessions if each.failure is None]))
    return results


def of_rank(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.roll(rank) if tensor.dim() else tensor + rank


def options(op: Any) -> Any:
    made = dist.AllreduceOptions()  # type: ignore[attr-defined]
    made.reduceOp = op
    return made


@pytest.mark.parametrize("name", TENSORS)
def test_all_have_what_each_has(name: str) -> None:
    tensor = TENSORS[name]
    expected = [of_rank(tensor, rank) for rank in range(RANKS)]

    def gather(group: _SessionGroup) -> list[Any]:
        own = of_rank(tensor, group.rank())
        places = [torch.empty_like(tensor) for _ in range(RANKS)]
        group.allgather([places], [own]).wait()
        whole = torch.empty((RANKS, *tensor.shape), dtype=tensor.dtype)
        group.all_gather_single(whole, own).wait()
        options = dist.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank = 1
        group.broadcast([own], options).wait()
        return [places, list(whole), own]

    for places, whole, taken in in_threads(gather):
        for found in (places, whole):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert torch.equal(taken, expected[1])


@pytest.mark.parametrize(("name", "expected"), [("SUM", 6.0), ("AVG", 2.0), ("PRODUCT", 6.0), ("MIN", 1.0), ("MAX", 3.0)])
def test_a_number_of_all(name: str, expected: float) -> None:
    def reduce(group: _SessionGroup) -> float:
        own = torch.tensor(float(group.rank() + 1), requires_grad=True)
        group.allreduce([own], options(getattr(dist.ReduceOp, name))).wait()
        return own.item()

    assert in_threads(reduce) == [expected] * RANKS


def test_a_rank_that_is_lost_ends_the_wait_of_the_others() -> None:
    def meet(group: _SessionGroup) -> None:
        group.barrier().wait()
        if group.rank() == 1:
            raise ValueError("boom")
        group.barrier().wait()

    first, lost, last = in_threads(meet)
    assert isinstance(lost, ValueError)
    for error in (first, last):
        assert isinstance(error, TransportError)
        assert str(error) == "rank 1 ended: boom"


def test_ranks_that_call_with_different_shapes_are_told() -> None:
    def reduce(group: _SessionGroup) -> None:
        group.allreduce([torch.zeros(1 + group.rank() // 2)], options(dist.ReduceOp.SUM))

    for error in in_threads(reduce):
        assert isinstance(error, ManifestMismatch | TransportError)
        assert "torch.distributed.all_reduce SUM of float32[1]" in str(error)
        assert "torch.distributed.all_reduce SUM of float32[2]" in str(error)


def test_before_the_loop_nothing_is_called() -> None:
    for error in in_threads(lambda group: group.allgather([[]], [torch.zeros(1)]), allowed=False):
        assert isinstance(error, UnsupportedError)
        assert str(error).startswith("torch.distributed.all_gather, before the loop over Elastic.steps() has begun: a new")
