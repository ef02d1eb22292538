"""The thread that waits for exchanges."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

from commsched.transports.backends.gloo.waiter import PendingWork, Waiter

PATIENCE = timedelta(seconds=100)


class Message:
    def __init__(self, fails: bool, waits: list[timedelta]) -> None:
        self._fails = fails
        self._waits = waits

    def wait(self, timeout: timedelta) -> None:
        self._waits.append(timeout)
        if self._fails:
            raise RuntimeError("Connection closed by peer")


def test_after_a_failure_nothing_is_waited_for() -> None:
    waits: list[timedelta] = []
    ends: list[str] = []
    waiter = Waiter("a waiter")
    for fails in ((False, False), (False, True, False), (True,)):
        messages: list[Any] = [Message(each, waits) for each in fails]
        waiter.put(PendingWork(messages, [], PATIENCE, lambda error: ends.append(str(error))))
    waiter.close()
    assert waits == [*[PATIENCE] * 4, timedelta(milliseconds=1)]
    assert ends == ["None", "Connection closed by peer", "Connection closed by peer"]
