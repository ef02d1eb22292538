"""Several observers as one, and one that tasks alone concern."""

from __future__ import annotations

from collections.abc import Callable

from .ports import Observer
from .task import CommTask


class Observers:
    """Tells each of ``observers`` what it is told; see ``ports.Observer``."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def on_step(self, group: int, step: int, at: float) -> None:
        for observer in self._observers:
            observer.on_step(group, step, at)

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        for observer in self._observers:
            observer.on_ready(group, tensor, at)

    def on_task(self, task: CommTask) -> None:
        for observer in self._observers:
            observer.on_task(task)

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        for observer in self._observers:
            observer.on_span(track, name, start, stop)


class TaskObserver:
    """Calls ``on_task`` with every task that is done; see ``ports.Observer``."""

    def __init__(self, on_task: Callable[[CommTask], None]) -> None:
        self.on_task = on_task

    def on_step(self, group: int, step: int, at: float) -> None:
        pass

    def on_ready(self, group: int, tensor: int, at: float) -> None:
        pass

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        pass
