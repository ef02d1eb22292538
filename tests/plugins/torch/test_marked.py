"""Marked tensors, where torch has no way to mark any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from commsched.plugins.torch import marked

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
