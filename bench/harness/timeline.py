"""The timeline of one step: forward, backward, the network, and the engine's waits."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import monotonic
from typing import Any, NamedTuple

import torch

from commsched.core.interfaces import Observer
from commsched.core.task import CommTask

#: Shorter waits are not recorded: they are the cost of the call itself.
_MIN_WAIT_SECONDS = 50e-6

Entry = dict[str, Any]


class _Message(NamedTuple):
    """The recorded fields of a CommTask. The task itself is not kept, because it holds the gradient's memory."""

    group: int
    partition: int
    first_byte: int
    nbytes: int
    ready_at: float
    started_at: float
    done_at: float


class Recorder(Observer):
    """Records one iteration of one model on one rank. The iteration begins with a backward and ends with the next forward.

    The recorder is an ``Observer`` of commsched's core. Other systems report their messages by :meth:`on_message`. It records
    from :meth:`backward_begins` to :meth:`stop`, and may stay attached afterwards. Times are from ``time.monotonic``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._lock = threading.Lock()
        self._recording = False
        self._began = self._forward_ended = 0.0
        self._forward_at: dict[str, float] = {}
        self._gradient_at: dict[str, float] = {}
        self._messages: list[_Message] = []
        self._entries: list[Entry] = []  # of the network and of waits
        self._handles: list[Any] = []
        tied: set[torch.nn.Parameter] = set()
        for name, module in model.named_modules():
            own = list(module.parameters(recurse=False))
            if own:
                self._handles.append(module.register_forward_pre_hook(self._on_forward(name or "model")))
            for parameter in own:
                if parameter not in tied:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient(name or "model")))
            tied.update(own)

    def _on_forward(self, name: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            if self._recording:
                self._forward_at.setdefault(name, monotonic())

        return mark

    def _on_gradient(self, name: str) -> Callable[..., None]:
        def mark(*_: Any) -> None:
            if self._recording:
                self._gradient_at[name] = monotonic()  # the last gradient of a layer counts

        return mark

    # --- the phases, reported by the training loop ---

    def backward_begins(self) -> None:
        self._recording = True
        self._began = monotonic()

    @contextmanager
    def forward_of_next_step(self) -> Iterator[None]:
        yield
        self._forward_ended = monotonic()

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        with self._lock:
            self._recording = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- the events ---

    def on_task(self, task: CommTask) -> None:
        """See ``core.interfaces.Observer``."""
        partition = task.partition
        times = task.ready_at, task.started_at, task.done_at
        with self._lock:
            if self._recording:
                self._messages.append(_Message(task.group, partition.index, partition.start, partition.nbytes, *times))

    def on_span(self, track: str, name: str, start: float, stop: float) -> None:
        """See ``core.interfaces.Observer``. Only waits are recorded; layers are timed by hooks, in the same way for all
        systems."""
        if track == "wait" and stop - start >= _MIN_WAIT_SECONDS:
            self._add({"track": "wait", "name": name, "priority": None, "start": start, "stop": stop})

    def on_message(self, name: str, start: float, stop: float) -> None:
        """Record a message without a priority on the network."""
        self._add({"track": "network", "name": name, "priority": None, "ready": start, "start": start, "stop": stop})

    def _add(self, entry: Entry) -> None:
        with self._lock:
            if self._recording:
                self._entries.append(entry)

    # --- the timeline ---

    def timeline(self, names: Sequence[str], nbytes: Sequence[int]) -> list[Entry]:
        """Entries ``{"track", "name", "priority", "start", "stop"}``, and ``"ready"`` on the track ``network``, by start, in
        seconds from the beginning of backward.

        Args:
            names, nbytes: names and bytes of the layers in forward order; partitions are named after them.
        """
        with self._lock:
            entries = [*self._backward(), *self._forward(), *self._network(names, nbytes), *map(dict, self._entries)]
        for entry in entries:
            for moment in {"start", "stop", "ready"} & entry.keys():
                entry[moment] -= self._began
        return sorted(entries, key=lambda entry: entry["start"])

    def _backward(self) -> Iterator[Entry]:
        before = self._began
        for name, moment in sorted(self._gradient_at.items(), key=lambda item: item[1]):
            yield {"track": "backward", "name": name, "priority": None, "start": before, "stop": moment}
            before = moment

    def _forward(self) -> Iterator[Entry]:
        """The forward entries. A layer waits before it computes; its entry begins after the wait, which has an entry of its
        own."""
        layers = sorted(self._forward_at.items(), key=lambda item: item[1])
        ends = [*(moment for _, moment in layers[1:]), self._forward_ended]
        waits = [entry["stop"] for entry in self._entries if entry["track"] == "wait"]
        for (name, begin), end in zip(layers, ends):
            start = max([begin, *(stop for stop in waits if begin < stop <= end)])
            yield {"track": "forward", "name": name, "priority": None, "start": start, "stop": end}

    def _network(self, names: Sequence[str], nbytes: Sequence[int]) -> Iterator[Entry]:
        sizes: dict[int, int] = {}
        for message in self._messages:
            sizes[message.group] = sizes.get(message.group, 0) + message.nbytes
        gradients = max(sizes, key=sizes.__getitem__, default=None)  # other groups are small: flags
        ends = list(accumulate(nbytes))
        for message in self._messages:
            is_gradient = message.group == gradients
            layer = min(bisect_right(ends, message.first_byte), len(names) - 1)
            yield {
                "track": "network",
                "name": f"{names[layer]} [{message.partition}]" if is_gradient else "flags",
                "priority": message.partition if is_gradient else None,
                "ready": message.ready_at,
                "start": message.started_at,
                "stop": message.done_at,
            }
