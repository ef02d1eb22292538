"""Priority inversions of a timeline: network tasks that started before a more urgent task that was ready. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .result import Span

#: A task is chosen some time before its start is recorded. A task that becomes ready in between does not count, because it came
#: too late for the choice.
SLACK_SECONDS = 1e-3


def network_tasks(timeline: Iterable[Span]) -> list[Span]:
    """The network tasks of ``timeline``, sorted by start."""
    return sorted((span for span in timeline if span.track == "network"), key=lambda span: span.start)


def with_priority(tasks: Iterable[Span]) -> list[Span]:
    """The tasks that have a priority; the buckets of a system without priorities, for example, are left out."""
    return [task for task in tasks if task.priority is not None]


def inversions(tasks: Sequence[Span]) -> list[Span]:
    """The tasks that started while a more urgent task was ready and waiting. ``tasks`` are sorted by start.

    A task without a ready time or a priority is ignored.
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
