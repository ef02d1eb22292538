"""Who is named for what when a rank waits too long: questions, answers and verdicts, without threads or a network."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import Any

import pytest

from commsched.core import stalls
from commsched.core.errors import ClosedError, CommschedError, PeerTimeout, TransportError
from commsched.core.stalls import RankProgress, Stalls, StepOfGroup, Wait, progress_of, verdict

PLACE = StepOfGroup(0, 12, 1)
WAIT = Wait("for the average of 'b' of step 12", PLACE)
SENT = RankProgress()


class Job:
    """The ranks of a job; what one sends reaches the others when :meth:`run` is called, as JSON would bring it."""

    def __init__(self, *progress: RankProgress, stall_after: float | None = None) -> None:
        self.progress = list(progress)
        self.said: list[str] = []
        self.failures: list[CommschedError] = []
        self.mute: set[int] = set()  # ranks that hear nothing
        self.mail: deque[tuple[int, int, Any]] = deque()  # from, to, what
        self.ranks = [self._rank(rank, stall_after) for rank in range(len(progress))]

    def _rank(self, rank: int, stall_after: float | None) -> Stalls:
        others = [0] if rank else range(1, len(self.progress))

        return Stalls(
            rank,
            len(self.progress),
            progress=lambda place: self.progress[rank],
            send=lambda message: self.mail.extend((rank, other, message) for other in others),
            warn=self.said.append,
            fail=self.failures.append,
            stall_after_seconds=stall_after,
        )

    def run(self) -> list[str]:
        """Deliver all; what was said since the last call."""
        while self.mail:
            sender, receiver, message = self.mail.popleft()
            if receiver in self.mute:
                continue
            if receiver == 0:
                self.ranks[0].on_message(sender, message)
            else:
                self.ranks[receiver].on_announced(message)
        said, self.said[:] = list(self.said), []
        return said


def test_every_rank_that_waits_says_who_has_not_sent_what() -> None:
    job = Job(SENT, SENT, progress_of(["b"], ["a"]))
    job.ranks[0].waits(WAIT, 6.2)
    job.ranks[1].waits(WAIT, 6.0)
    assert sorted(job.run()) == [
        "rank 0 has waited 6 s for the average of 'b' of step 12: rank 2 has not sent 'b'",
        "rank 1 has waited 6 s for the average of 'b' of step 12: rank 2 has not sent 'b'",
    ]
    job.progress[2] = RankProgress(begun=False, waits="for the average of 'x' of step 3")
    job.ranks[1].waits(Wait("to begin step 13", PLACE._replace(tensor=-1)), 12.0)
    verdict = "rank 2 has not begun step 12 and waits for the average of 'x' of step 3 itself"
    assert job.run() == [f"rank 1 has waited 12 s to begin step 13: {verdict}"]


def test_a_rank_that_begins_to_wait_a_moment_later_need_not_ask() -> None:
    job = Job(SENT, progress_of(["b"], []), SENT)
    job.ranks[2].waits(WAIT, 6.0)
    job.run()
    job.progress[1] = SENT  # whoever asked now would hear otherwise
    job.ranks[0].waits(WAIT, 6.0)
    assert job.run() == ["rank 0 has waited 6 s for the average of 'b' of step 12: rank 1 has not sent 'b'"]


def test_a_rank_that_begins_to_wait_later_is_not_told_of_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stalls, "monotonic", lambda: now)
    job = Job(SENT, progress_of(["b"], []), progress_of(["b"], []))
    job.ranks[0].waits(WAIT, 6.0)
    assert job.run() == ["rank 0 has waited 6 s for the average of 'b' of step 12: ranks 1, 2 have not sent 'b'"]
    job.progress[1] = SENT
    now = 102.0
    job.ranks[1].waits(WAIT, 6.0)
    assert job.run() == ["rank 1 has waited 6 s for the average of 'b' of step 12: rank 2 has not sent 'b'"]


def test_a_rank_that_does_not_answer_is_named_at_the_second_time() -> None:
    job = Job(SENT, SENT, SENT)
    job.mute.add(1)
    job.ranks[2].waits(WAIT, 6.0)
    assert job.run() == []
    job.ranks[2].waits(WAIT, 12.0)
    assert "rank 2 has waited 12 s for the average of 'b' of step 12: rank 1 does not answer" in job.run()


@pytest.mark.parametrize("deaf", [{1}, {1, 2}])
def test_a_rank_that_asks_again_before_it_has_read_the_question_is_not_named(deaf: set[int]) -> None:
    """It was in one long call, which held the interpreter's lock."""
    job = Job(SENT, SENT, SENT, stall_after=10.0)
    job.mute |= deaf
    job.ranks[1].waits(WAIT, 6.0)
    job.run()
    job.mute -= {1}
    job.ranks[1].waits(WAIT, 21.0)
    verdict = "every rank has sent it, so it waits for the network or a server" if deaf == {1} else "rank 2 does not answer"
    assert f"rank 1 has waited 21 s for the average of 'b' of step 12: {verdict}" in job.run()
    assert [type(error) for error in job.failures] == ([TransportError] if deaf == {1} else [])


def test_an_answer_that_comes_too_late_is_none_to_the_next_question() -> None:
    job = Job(SENT, SENT)
    job.mute.add(1)
    for seconds in (6.0, 12.0):
        job.ranks[0].waits(WAIT, seconds)
    job.run()
    job.ranks[0].on_message(1, {"place": PLACE, "number": 1, "answer": asdict(progress_of(["b"], []))})
    assert not job.mail
    job.ranks[0].on_message(1, {"place": PLACE, "number": 2, "answer": asdict(SENT)})
    [(_, _, announced)] = job.mail
    assert announced["text"] == "every rank has sent it, so it waits for the network or a server"


def test_a_rank_0_that_does_not_answer_is_named_by_who_waits() -> None:
    job = Job(SENT, SENT)
    job.mute.add(0)
    job.ranks[1].waits(WAIT, 6.0)
    job.run()
    job.ranks[1].waits(WAIT, 12.0)
    assert job.run() == ["rank 1 has waited 12 s for the average of 'b' of step 12: rank 0 does not answer"]


def test_a_rank_that_has_left_is_not_asked() -> None:
    job = Job(SENT, progress_of(["b"], []), SENT)
    job.mute.add(2)
    job.ranks[0].leave(2)
    job.ranks[0].waits(WAIT, 6.0)
    assert job.run() == ["rank 0 has waited 6 s for the average of 'b' of step 12: rank 1 has not sent 'b'"]


def test_what_is_no_wait_for_an_average_is_said_at_once() -> None:
    job = Job(SENT, SENT)
    job.ranks[1].waits(Wait("to leave"), 10.0)
    assert job.said == ["rank 1 has waited 10 s to leave"]


@pytest.mark.parametrize(
    ("late", "kind", "message"),
    [
        (
            RankProgress(begun=False),
            PeerTimeout,
            "rank 2 has not begun step 12; rank 1 has waited 30 s for the average of 'b' of step 12, and stall_after is 30 s",
        ),
        (
            SENT,
            TransportError,
            "every rank has sent it, so it waits for the network or a server; rank 1 has waited 30 s "
            "for the average of 'b' of step 12, and stall_after is 30 s",
        ),
    ],
)
def test_a_wait_as_long_as_stall_after_ends_the_job(late: RankProgress, kind: type[Exception], message: str) -> None:
    job = Job(SENT, SENT, late, stall_after=30.0)
    job.ranks[1].waits(WAIT, 29.9)
    job.run()
    assert job.failures == []
    job.ranks[1].waits(WAIT, 30.0)
    job.run()
    [failure] = job.failures
    assert (type(failure), str(failure)) == (kind, message)
    assert (failure.rank, failure.step) == (2 if kind is PeerTimeout else None, 12)


def test_the_longest_wait_ends_the_job_and_of_several_late_ranks_none_is_the_one() -> None:
    job = Job(SENT, SENT, RankProgress(begun=False), RankProgress(begun=False), stall_after=30.0)
    job.ranks[0].waits(WAIT, 29.0)
    job.ranks[1].waits(WAIT, 30.0)
    job.run()
    [failure] = job.failures
    waited = "rank 1 has waited 30 s for the average of 'b' of step 12, and stall_after is 30 s"
    assert str(failure) == f"ranks 2, 3 have not begun step 12; {waited}"
    assert (type(failure), failure.rank, failure.step) == (PeerTimeout, None, 12)


def test_a_session_that_ends_meanwhile_is_none_of_its_business() -> None:
    def send(message: Any) -> None:
        raise ClosedError("over")

    said: list[str] = []
    alone = Stalls(1, 2, progress=lambda place: SENT, send=send, warn=said.append, fail=pytest.fail)  # type: ignore[arg-type]
    alone.waits(WAIT, 6.0)
    assert said == []


@pytest.mark.parametrize(
    ("answers", "silent", "ranks", "text"),
    [
        ({0: SENT, 1: SENT}, [], (), "every rank has sent it, so it waits for the network or a server"),
        ({0: progress_of(["a"], []), 1: SENT}, [], (0,), "rank 0 has not sent 'a'"),
        (
            {0: SENT, 1: progress_of(list("abcde"), []), 2: progress_of(list("abcde"), [])},
            [],
            (1, 2),
            "ranks 1, 2 have not sent 'a', 'b', 'c' and 2 more",
        ),
        (
            {0: SENT, 1: RankProgress(begun=False), 2: progress_of(["a"], [])},
            [3],
            (1, 2, 3),
            "rank 1 has not begun step 12; rank 2 has not sent 'a'; rank 3 does not answer",
        ),
        (
            {0: SENT, 1: progress_of([], ["c"])},
            [],
            (1,),
            "every rank has sent it, but rank 1 has not sent 'c' of the same step",
        ),
        (
            {0: SENT, 1: progress_of([], ["c"], is_static=True)},
            [],
            (1,),
            "every rank has sent it, but rank 1 has not sent 'c' of the same step, for which a static order waits "
            "(order=agreed does not)",
        ),
        ({0: SENT, 1: progress_of(["b"], []), 2: progress_of([], ["c"])}, [], (1,), "rank 1 has not sent 'b'"),
        (
            {rank: RankProgress(begun=False) for rank in range(11)},
            [],
            tuple(range(11)),
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more have not begun step 12",
        ),
    ],
)
def test_verdicts(answers: dict[int, RankProgress], silent: list[int], ranks: tuple[int, ...], text: str) -> None:
    assert verdict(12, answers, silent) == (ranks, text)
