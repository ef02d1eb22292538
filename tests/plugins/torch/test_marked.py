"""Marked tensors, and a torch that has no way to mark any."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from commsched.plugins.torch import marked
from commsched.plugins.torch.marked import is_marked, marked_twin, unmark, unnoticed

from .loops.loop import require_plain, train


@pytest.fixture
def _no_such_key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    registered = marked._registered()
    monkeypatch.setattr(marked, "_registered", lambda: None)  # what is registered already stays so
    marked.warn_if_impossible.cache_clear()
    yield
    marked.warn_if_impossible.cache_clear()
    assert registered is not None


@pytest.mark.usefixtures("_no_such_key")
def test_a_torch_without_the_key_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        require_plain(train)
    said = [record.getMessage() for record in caplog.records if "nested tensors" in record.getMessage()]
    assert len(said) == 1
    assert "has no 'TESTING_ONLY_GenericWrapper'" in said[0]
    assert "call optimizer.synchronize() after each step()" in said[0]


def test_a_torch_that_has_it_is_not(caplog: pytest.LogCaptureFixture) -> None:
    marked.warn_if_impossible.cache_clear()
    marked.warn_if_impossible()
    assert caplog.records == []


def test_a_key_that_torch_does_not_know_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marked, "_KEY", "NO_SUCH_KEY")
    assert marked._registered.__wrapped__() is None


def twin_of(values: torch.Tensor) -> torch.Tensor:
    twin = marked_twin(values)
    assert twin is not None
    assert is_marked(twin)
    return twin


PLACES = {
    "behind an offset": lambda: torch.arange(8.0)[2:],
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "both": lambda: torch.arange(8.0)[2:].reshape(2, 3).T,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_twin_shows_the_same_memory_while_it_is_marked_and_afterwards(place: str) -> None:
    values = PLACES[place]()
    twin = twin_of(values)
    with unnoticed():
        assert (twin.data_ptr(), twin.stride()) == (values.data_ptr(), values.stride())
        assert torch.equal(twin, values)
    unmark(twin)
    assert not is_marked(twin)
    assert (twin.data_ptr(), twin.stride()) == (values.data_ptr(), values.stride())
    assert torch.equal(twin, values)


def test_a_mark_that_belongs_to_no_parameter_ends_when_it_is_touched() -> None:
    """A view has one if C++ code made it while the parameter was marked, and the parameter is not any more."""
    twin = twin_of(torch.ones(3))
    assert torch.equal(twin + 1, torch.full((3,), 2.0))
    assert not is_marked(twin)


@pytest.mark.parametrize("operation", [torch.add, torch.maximum])  # registered by itself, and by the fallback
@pytest.mark.parametrize("stays", [0, 1])
def test_an_operation_runs_whichever_of_its_tensors_stays_marked_and_touches_each_once(
    operation: Callable[..., torch.Tensor], stays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter stays marked while the thread that reads it makes its update."""
    touched: list[int] = []

    def on_touch(tensor: torch.Tensor) -> None:
        touched.append(id(tensor))
        if tensor is not twins[stays]:
            unmark(tensor)

    values = torch.ones(3), torch.full((3,), 2.0)
    twins = [twin_of(value) for value in values]
    monkeypatch.setattr(marked, "_on_touch", [on_touch])
    assert torch.equal(operation(*twins), operation(*values))
    assert touched == [id(twin) for twin in twins]
    assert [is_marked(twin) for twin in twins] == [stays == 0, stays == 1]
