"""What is left of a model that nobody has any more takes part in the open round with zeros."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from commsched.plugins.torch.layout import Registered, end_abandoned


class Session:
    def __init__(self) -> None:
        self.cleanup = ExitStack()

    def on_close(self, callback: Callable[[], None]) -> None:
        pass


class Device:
    def settle(self) -> None:
        pass

    def when_written(self, callback: Callable[[], None]) -> None:
        callback()

    def close(self) -> None:
        pass


class Group:
    """Tensor 1 of two is missing in the open round."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        self.views = views
        self.notified: list[tuple[int, list[float]]] = []
        self.released = False

    def missing(self) -> list[int]:
        return [1]

    def notify_ready(self, tensor: int) -> None:
        self.notified.append((tensor, self.views[tensor].tolist()))

    def release(self) -> None:
        self.released = True


def test_what_is_missing_of_an_abandoned_model_counts_as_zeros() -> None:
    session: Any = Session()
    device: Any = Device()
    views = [torch.ones(2), torch.ones(3)]
    group: Any = Group(views)
    registered = Registered(session, device)
    registered.add(group, views)
    registered.abandon()
    assert not group.notified
    end_abandoned(session)
    assert group.notified == [(1, [0.0, 0.0, 0.0])]
    assert views[0].tolist() == [1.0, 1.0]
    assert group.released
