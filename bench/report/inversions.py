"""Priority inversions of a timeline: tasks of the network that went before a more urgent one that was ready. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .result import Span

#: A task is chosen some moments before its start is noted; what becomes ready in between it could not have waited for.
SLACK_SECONDS = 1e-3


def network_tasks(timeline: Iterable[Span]) -> list[Span]:
    """By their start."""
    return sorted((span for span in timeline if span.track == "network"), key=lambda span: span.start)


def with_priority(tasks: Iterable[Span]) -> list[Span]:
    """Without, say, the buckets of a system that has none."""
    return [task for task in tasks if task.priority is not None]


def inversions(tasks: Sequence[Span]) -> list[Span]:
    """Those of ``tasks``, which are sorted by start, that started while a more urgent one was ready and waiting.

    A task that does not say when it was ready or how urgent it was takes no part.
    """
    judged = [(task, task.priority, task.ready) for task in tasks if task.priority is not None and task.ready is not None]
    return [
        task
        for index, (task, priority, _) in enumerate(judged)
        if any(
            other_priority < priority and other_ready + SLACK_SECONDS <= task.start < other.start
            for other, other_priority, other_ready in judged[index + 1 :]
        )
    ]
