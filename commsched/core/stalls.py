"""Stalls: when a rank waits too long for an average, finds the ranks that have not sent it.

A rank that waits reports this to rank 0. Rank 0 asks all ranks, derives a verdict from their answers and announces it. Each
rank that waits shows the verdict. This depends on no transport: each rank's core knows which of its own gradients are not
ready. Nothing here has a timer: a rank that does not answer is named when a rank that waits asks for the second time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from .errors import CommschedError, PeerTimeout, TransportError, ranks_text

#: The last verdict also answers a wait for the same place that is reported within this time.
_FRESH_SECONDS = 1.0

#: The most names of tensors, and the most ranks, that one line lists.
_MAX_NAMES, _MAX_RANKS = 3, 8


class StepOfGroup(NamedTuple):
    """The average that a rank waits for, of ``tensor`` in ``step`` of ``group``. Tensor -1 means all tensors."""

    group: int
    step: int
    tensor: int


class Wait(NamedTuple):
    """One rank's wait. ``what`` completes the sentence "rank 0 has waited 6 s ...". ``place`` is None if the wait is not for an
    average."""

    what: str
    place: StepOfGroup | None = None


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank's answer about a place.

    ``begun``: whether the rank has begun the step. ``missing``: how many gradients of the place are not ready. ``names``: the
    names of the first of these. ``others``: the names of the first gradients that are not ready elsewhere in the step.
    ``waits``: what the rank itself waits for. ``is_static``: it launches in a static order, in which the place may wait for
    ``others``.
    """

    begun: bool = True
    missing: int = 0
    names: Sequence[str] = ()
    others: Sequence[str] = ()
    waits: str = ""
    is_static: bool = False


def progress_of(missing: Sequence[str], others: Sequence[str], is_static: bool = False) -> RankProgress:
    """The answer of a rank that has begun the step. ``missing`` and ``others`` name its gradients that are not ready."""
    return RankProgress(True, len(missing), missing[:_MAX_NAMES], others[:_MAX_NAMES], is_static=is_static)


class StallVerdict(NamedTuple):
    """The ranks that keep the others waiting, if any, and a sentence about them."""

    ranks: tuple[int, ...]
    text: str


def verdict(step: int, answers: Mapping[int, RankProgress], silent: Sequence[int]) -> StallVerdict:
    """The verdict that follows from the ``answers`` of ranks about a place in ``step``; ``silent`` ranks have not answered."""
    late: dict[str, list[int]] = {}  # ranks that have not sent the place's gradients, by phrase about them
    behind: dict[str, list[int]] = {}  # the same for ranks that lack only other gradients of the step
    for rank, progress in sorted(answers.items()):
        if not progress.begun:
            itself = f" and waits {progress.waits} itself" if progress.waits else ""
            late.setdefault(f"not begun step {step}{itself}", []).append(rank)
        elif progress.missing:
            late.setdefault(f"not sent {_listed(progress.names, progress.missing)}", []).append(rank)
        elif progress.others:
            hint = ", for which a static order waits (order=agreed does not)" if progress.is_static else ""
            named = _listed(progress.others, len(progress.others))
            behind.setdefault(f"not sent {named} of the same step{hint}", []).append(rank)
    said = [
        f"{ranks_text(ranks, _MAX_RANKS)} {'has' if len(ranks) == 1 else 'have'} {what}"
        for what, ranks in (late or behind).items()
    ]
    if silent:
        said.append(f"{ranks_text(silent, _MAX_RANKS)} {'does' if len(silent) == 1 else 'do'} not answer")
    if not said:
        return StallVerdict((), "every rank has sent it, so it waits for the network or a server")
    culprits = sorted({*silent, *(rank for ranks in (late or behind).values() for rank in ranks)})
    return StallVerdict(tuple(culprits), ("" if late or silent else "every rank has sent it, but ") + "; ".join(said))


def _listed(names: Sequence[str], count: int) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MAX_NAMES])
    return shown if count <= len(names) else f"{shown} and {count - len(names)} more"


@dataclass(slots=True)
class _Question:
    """A question of rank 0 to all ranks, about one place."""

    number: int
    waiting: dict[int, tuple[float, str]] = field(default_factory=dict)  # by rank that waits: its seconds and ``Wait.what``
    answers: dict[int, RankProgress] = field(default_factory=dict)


class Stalls:
    """One rank's part. Any thread. Never blocks, and makes no call with its lock held.

    Args:
        progress: returns this rank's progress at a place.
        send: sends a JSON value to rank 0; on rank 0, to all others. May raise CommschedError when the session ends.
        warn: shows a line.
        fail: ends the job.
        stall_after_seconds: a wait of this length ends the job. ``None`` means no limit.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        progress: Callable[[StepOfGroup], RankProgress],
        send: Callable[[Any], None],
        warn: Callable[[str], None],
        fail: Callable[[CommschedError], None],
        stall_after_seconds: float | None = None,
    ) -> None:
        self._rank = rank
        self._progress = progress
        self._send = send
        self._warn = warn
        self._fail = fail
        self._stall_after_seconds = stall_after_seconds
        self._lock = threading.Lock()  # guards all fields below
        self._asked: dict[Wait, float] = {}  # waits of this rank that have no verdict yet, with their seconds
        self._last: tuple[StepOfGroup | None, str, float] = (None, "", 0.0)  # the last verdict, and the time of its arrival
        self._present = set(range(world_size))  # used on rank 0 only, like all fields below
        self._questions: dict[StepOfGroup, _Question] = {}
        self._numbers = 0

    def waits(self, wait: Wait, seconds: float) -> None:
        """Report that this rank has waited too long; it may have reported the same wait before."""
        place = wait.place
        if place is None:
            self._say(wait, seconds, "")
            return
        with self._lock:
            last_place, text, at = self._last
            is_known = place == last_place and monotonic() - at < _FRESH_SECONDS and not self._is_too_long(seconds)
            earlier = self._asked.pop(wait, None)
            if not is_known:
                self._asked[wait] = seconds
        if is_known:
            self._say(wait, seconds, text)
            return
        if earlier is not None:
            self._say(wait, seconds, "rank 0 does not answer" if self._rank else "")
        if self._rank == 0:
            self._told_of_wait(0, place, seconds, wait.what)
        else:
            self._try_to_send({"waits": place, "seconds": seconds, "what": wait.what})

    def _say(self, wait: Wait, seconds: float, text: str) -> None:
        self._warn(f"rank {self._rank} has waited {seconds:.0f} s {wait.what}{': ' if text else ''}{text}")

    def _try_to_send(self, message: Any) -> None:
        try:
            self._send(message)
        except CommschedError:
            pass  # the session ends, which ends the wait too

    def _is_too_long(self, seconds: float) -> bool:
        return self._stall_after_seconds is not None and seconds >= self._stall_after_seconds

    # --- messages ---

    def on_announced(self, message: Mapping[str, Any]) -> None:
        """Handle a message that rank 0 announced; called on the other ranks."""
        place = StepOfGroup(*message["place"])
        if "text" in message:
            self._hear(place, str(message["text"]))
        else:
            answer = asdict(self._progress(place))
            self._try_to_send({"place": place, "number": message["number"], "answer": answer})

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handle a message that ``rank`` sent to rank 0; called on rank 0."""
        if "waits" in message:
            self._told_of_wait(rank, StepOfGroup(*message["waits"]), float(message["seconds"]), str(message["what"]))
        else:
            self._answered(rank, StepOfGroup(*message["place"]), int(message["number"]), RankProgress(**message["answer"]))

    def _hear(self, place: StepOfGroup, text: str) -> None:
        with self._lock:
            self._last = (place, text, monotonic())
            mine = [(wait, seconds) for wait, seconds in self._asked.items() if wait.place == place]
            for wait, _ in mine:
                del self._asked[wait]
        for wait, seconds in mine:
            self._say(wait, seconds, text)

    # --- rank 0 ---

    def leave(self, rank: int) -> None:
        """Note that ``rank`` has left and answers no further question."""
        with self._lock:
            self._present.discard(rank)

    def _told_of_wait(self, rank: int, place: StepOfGroup, seconds: float, what: str) -> None:
        with self._lock:
            earlier = self._questions.get(place)
            if earlier is not None and rank not in earlier.waiting:
                earlier.waiting[rank] = (seconds, what)
                return
            self._numbers += 1
            question = self._questions[place] = _Question(self._numbers, {rank: (seconds, what)})
            # A rank that asks is alive. After one long call it may ask again before it has read the question or answered it.
            if earlier is not None and self._present - earlier.answers.keys() <= {rank}:
                question.waiting = {**earlier.waiting, **question.waiting}
                earlier = None
        if earlier is not None:  # a rank that has not answered the earlier question by now counts as silent
            self._conclude(place, earlier, asks=rank)
        self._try_to_send({"place": place, "number": question.number})
        self._answered(0, place, question.number, self._progress(place))

    def _answered(self, rank: int, place: StepOfGroup, number: int, progress: RankProgress) -> None:
        with self._lock:
            question = self._questions.get(place)
            if question is None or question.number != number:
                return
            question.answers[rank] = progress
            if self._present - question.answers.keys():
                return
            del self._questions[place]
        self._conclude(place, question)

    def _conclude(self, place: StepOfGroup, question: _Question, asks: int | None = None) -> None:
        silent = sorted(self._present - question.answers.keys() - {asks})
        found = verdict(place.step, question.answers, silent)
        self._try_to_send({"place": place, "text": found.text})
        self._hear(place, found.text)
        seconds, what, rank = max((seconds, what, rank) for rank, (seconds, what) in question.waiting.items())
        if self._is_too_long(seconds):
            kind = PeerTimeout if found.ranks else TransportError
            limit = f"stall_after is {self._stall_after_seconds:g} s"
            culprit = found.ranks[0] if len(found.ranks) == 1 else None
            message = f"{found.text}; rank {rank} has waited {seconds:.0f} s {what}, and {limit}"
            self._fail(kind(message, rank=culprit, step=place.step))
