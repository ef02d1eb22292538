"""Fixtures of several folders of these tests."""

from __future__ import annotations

import pytest

from commsched.transports.hierarchy import messages


@pytest.fixture
def everything_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small memory too, as that of the tests is."""
    monkeypatch.setattr(messages, "PINNED_FROM_BYTES", 0)
