"""Elastic jobs whose ranks are threads: the decisions are those of the launcher, the sessions are local ones."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

from commsched.control.elastic_messages import Place
from commsched.control.generations import Action, Asked, Dismiss, Form, Generations, GiveUp, Start, Summon
from commsched.core.errors import TransportError
from commsched.core.interfaces import Completion, ForwardingTransport, Transport
from commsched.core.manifest import Manifest
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import CommTask
from commsched.session import elastic
from commsched.session.local import local_sessions
from commsched.session.session import Session

T = TypeVar("T")

SMALL = SchedulerConfig(partition_bytes=200, credit_bytes=10_000)  # so that each tensor travels for itself


class Killed(BaseException):
    """Raised where a rank is to die."""


@dataclass
class Run(Generic[T]):
    """The end of a job: the results by rank, and (ranks, steps) of each generation."""

    results: dict[int, T] = field(default_factory=dict)
    generations: list[tuple[int, int]] = field(default_factory=list)
    why: str = ""  # it has failed


@dataclass
class Late:
    """When the ranks that replace others come, and whether the others were called."""

    may_come: threading.Event = field(default_factory=threading.Event)
    called: threading.Event = field(default_factory=threading.Event)


class _Withholding(ForwardingTransport):
    """Never sends those partitions of the gradients where ``holds(rank, step, partition)``, as if the rank had died before."""

    def __init__(self, inner: Transport, holds: Callable[[int, int, int], bool]) -> None:
        super().__init__(inner)
        self._holds = holds
        self.gradients = -1  # the group that has them

    def start(self, task: CommTask, completion: Completion) -> None:
        if not (task.group == self.gradients and self._holds(self.rank, task.step, task.partition.index)):
            super().start(task, completion)


class _World(Generic[T]):
    def __init__(
        self,
        train: Callable[[Session], T],
        ranks: int,
        min_ranks: int,
        max_restarts: int,
        holds: Callable[[int, int, int], bool],
        late: Late | None,
    ) -> None:
        self._holds = holds
        self._ranks = ranks
        self._train = train
        waits = math.inf if late is None else -1.0
        self._generations = Generations(min_ranks, max_restarts, join_within_seconds=60.0, replace_within_seconds=waits)
        self._late = late
        self._flags: dict[int, SimpleNamespace] = {}  # by member: in the place of its ElasticMember
        self._changed = threading.Condition()  # guards all
        self._waiting: dict[int, Future[Session | None]] = {}
        self._threads: list[threading.Thread] = []
        self._members = threading.local()
        self._errors: list[BaseException] = []
        self.run: Run[T] = Run()

    def start(self, rank: int) -> None:
        member = len(self._threads)
        self._generations.wanted(member, rank, time.monotonic())
        self._generations.started(member, time.monotonic())
        thread = threading.Thread(target=self._member, args=(member,), name=f"member-{member}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def move_on(self, asked: Asked) -> Session | None:
        """As ``commsched.session.process.move_on``, in the thread of a member."""
        answer: Future[Session | None] = Future()
        with self._changed:
            self._waiting[self._members.number] = answer
            now = time.monotonic()
            self._do(self._generations.asked(self._members.number, asked, now))
            self._do(self._generations.tick(now))
        session = answer.result(60.0)
        if session is not None:
            self._members.session = session
        return session

    def say_farewell(self, asked: Asked) -> None:
        """As ``commsched.session.process.say_farewell``."""
        with suppress(TransportError):
            self.move_on(asked)

    def _member(self, member: int) -> None:
        self._members.number, self._members.session = member, None
        well, is_consequence, result = False, False, None
        try:
            if self._late is not None and member >= self._ranks:
                assert self._late.may_come.wait(60.0)
            session = self.move_on(Asked())
            assert session is not None
            result = self._train(session)
            self._members.session.close()
            well = True
        except SystemExit:
            pass  # it has left
        except BaseException as error:
            is_consequence = isinstance(error, TransportError)
            if not isinstance(error, Killed | TransportError):
                self._errors.append(error)
            if self._members.session is not None:
                self._members.session.abort(f"{type(error).__name__}: {error}")
        with self._changed:
            if well:
                self.run.results[self._members.session.rank] = result  # type: ignore[assignment]
            self._do(self._generations.ended(member, well, is_consequence))
            self._do(self._generations.tick(time.monotonic()))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(rank):
                    self.start(rank)
                case Form(generation, ranks, root, steps):
                    self.run.generations.append((len(ranks), steps))
                    wrap = partial(_Withholding, holds=self._holds if generation == 1 else lambda *_: False)
                    sessions = local_sessions(len(ranks), SMALL, check_weights=1, wrap_transport=wrap)
                    for session in sessions:
                        session.on_register(partial(_note_gradients, session))
                    for member, rank in ranks.items():
                        sessions[rank].place = Place(generation, rank, len(ranks), rank, len(ranks), root, steps, "", "")
                        self._flags[member] = SimpleNamespace(is_summoned=False)
                        sessions[rank].membership = self._flags[member]  # type: ignore[assignment]
                        self._waiting.pop(member).set_result(sessions[rank])
                case Summon(member):
                    self._flags[member].is_summoned = True
                    assert self._late is not None
                    self._late.called.set()
                case Dismiss(member):
                    self._waiting.pop(member).set_result(None)
                case GiveUp(why):
                    self.run.why = why
                    for answer in self._waiting.values():
                        answer.set_exception(TransportError(why))
                    self._waiting.clear()

    def wait(self) -> Run[T]:
        give_up_at = time.monotonic() + 60.0
        for thread in self._threads:  # it grows meanwhile
            thread.join(give_up_at - time.monotonic())
            assert not thread.is_alive(), thread.name
        if self._errors:
            raise self._errors[0]
        return self.run


def _note_gradients(session: Session, index: int, manifest: Manifest) -> None:
    transport = session.transport
    assert isinstance(transport, _Withholding)
    transport.gradients = index


def run_elastic(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    train: Callable[[Session], T],
    *,
    min_ranks: int | None = None,
    max_restarts: int = 0,
    holds: Callable[[int, int, int], bool] = lambda *_: False,
    late: Late | None = None,
) -> Run[T]:
    """Run ``train(session)`` for each rank in a thread. A rank that raises ``Killed`` is lost; its successor calls it anew.
    ``holds``: see ``_Withholding``, for the first generation. ``late``: when new ranks come, whom the others do not await."""
    world = _World(train, ranks, ranks if min_ranks is None else min_ranks, max_restarts, holds, late)
    monkeypatch.setattr(elastic, "move_on", world.move_on)
    monkeypatch.setattr(elastic, "say_farewell", world.say_farewell)
    with world._changed:
        for rank in range(ranks):
            world.start(rank)
    return world.wait()


class Gates:
    """Kills each rank of ``kills``, as (where, rank, step), once."""

    def __init__(self, *kills: tuple[str, int, int]) -> None:
        self.leave: dict[int, Callable[[], None]] = {}  # by rank: lets it leave after the step in hand
        self._left = set(kills)
        self._lock = threading.Lock()

    def at(self, where: str, rank: int, step: int) -> None:
        with self._lock:
            if (where, rank, step) not in self._left:
                return
            self._left.remove((where, rank, step))
        raise Killed


def kill_the_giver(
    monkeypatch: pytest.MonkeyPatch, where: str | int, generations: Sequence[int] = (2,), rank: int | None = None
) -> None:
    """Kill the root of these generations while it gives its values to the others: in its broadcast ``where``, counted from 0,
    for which the others have zeroed what they have, or before it gathers for the purpose ``where``. Or kill ``rank`` there."""
    calls = {generation: itertools.count() for generation in generations}

    def gives(session: Session) -> bool:
        victim = session.root if rank is None else rank
        return session.place is not None and session.place.generation in generations and session.rank == victim

    def run_once(session: Session, *given: Any) -> None:
        if gives(session) and session.place is not None and next(calls[session.place.generation]) == where:
            raise Killed
        then_run_once(session, *given)

    def gather(session: Session, value: Any, what: str = "") -> list[Any]:
        if gives(session) and what == where:
            raise Killed
        return then_gather(session, value, what)

    then_run_once, then_gather = Session._run_once, Session.gather
    monkeypatch.setattr(Session, "_run_once", run_once)
    monkeypatch.setattr(Session, "gather", gather)


def equal(results: dict[int, Any]) -> Any:
    """The result that all ranks have."""
    first = results[0]
    assert all(each == first for each in results.values())
    return first
