"""Elastic: a training loop that goes on when ranks are lost."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, get_args

from ..control.generations import Asked
from ..core import timeouts
from ..core.comparison import require_same
from ..core.errors import FEWER_BATCHES, CommschedError, ConfigError, PeerTimeout, TransportError, UnsupportedError
from .process import move_on, say_farewell
from .process_end import is_consequence
from .session import Session

log = logging.getLogger("commsched")

#: Where copies of what updates replace are kept: beside the values, in the host's memory, or nowhere.
Keep = Literal["device", "cpu", "nothing"]


class HasState(Protocol):
    """Something whose state belongs to a step, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class ElasticOptimizer(Protocol):
    """An optimizer that can be elastic."""

    @property
    def elastic_part(self) -> ElasticPart: ...


class ElasticPart(Protocol):
    """The part of a plugin's optimizer that :class:`Elastic` uses. All but the first two are used in an elastic job only."""

    @property
    def session(self) -> Session: ...

    def synchronize(self) -> None: ...

    def begin_undo(self, keep: Keep) -> None:
        """Keep from now on what :meth:`go_back` needs, where ``keep`` says."""

    def begin_step(self, step: int) -> int:
        """The loop begins ``step``. Return the number of steps whose result :meth:`leave` may return, if not ``step``."""

    def note(self) -> Any:
        """Return what :meth:`go_back` takes: the state besides what updates change, which is hyper-parameters and buffers."""

    def leave(self) -> int | None:
        """Release the model, without the other ranks, from a session that has ended. Return the most steps whose result this
        rank has, or can go back to; None: it has none, since nothing is kept."""

    def go_back(self, steps: int, noted: Any) -> None:
        """Put the values after ``steps`` steps in place. ``noted``: what :meth:`note` returned then.

        Raises:
            UnsupportedError: that is impossible, and nothing was changed.
        """

    def keep(self) -> bool:
        """Keep the values that :meth:`go_back` has put in place, until :meth:`begin_anew`: it can do so again, although
        :meth:`move` replaces some of them or all. False: nothing is kept."""

    def move(self, session: Session) -> None:
        """Take part in ``session``, with the values of the rank ``session.root``. Collective, with the same calls as the
        optimizer's constructor."""

    def begin_anew(self, steps: int) -> None:
        """All values are those after ``steps`` steps, on all ranks. What was kept is of no use any more."""

    def load(self, each: Any, state: dict[str, Any]) -> None:
        """Give ``each``, an object of ``also``, the ``state`` that it had between two steps."""

    def hyper_parameters(self) -> Any: ...

    def set_hyper_parameters(self, values: Any) -> None: ...


class ElasticStep:
    """One step of an elastic loop, as a context: ``with step:``. A loss of other ranks within ends the block, and the loop goes
    on.

    Attributes:
        number: from 0; a step that was broken off comes again with the same number.
        rank, world_size: of this process, in this step.
        is_new_world: this is the first step of this process, or the first since ranks were lost.
    """

    def __init__(self, number: int, session: Session, is_new_world: bool) -> None:
        self.number = number
        self.rank = session.rank
        self.world_size = session.world_size
        self.is_new_world = is_new_world
        self._session = session
        self._is_entered = False
        self._lost: BaseException | None = None

    def __enter__(self) -> ElasticStep:
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception) or not _is_of_lost_ranks(error, self._session):
            return False
        self._lost = error
        return True

    def __repr__(self) -> str:
        return f"<ElasticStep {self.number} of rank {self.rank} of {self.world_size}>"


class Elastic:
    """A training loop that goes on when ranks are lost, under ``commsched run --elastic``::

        optimizer = cs.ScheduledOptimizer(optimizer, model)
        elastic = commsched.Elastic(optimizer, also=[scheduler])
        for step in elastic.steps(10_000):
            with step:
                inputs, labels = batch(step.number, step.rank, step.world_size)
                ...
                optimizer.step()
                scheduler.step()

    When a rank is lost, the others get an error within the step. The block ends, all ranks go on to, or back to, the result of
    one step, and the loop goes on from there, with a new process in place of the lost one or with fewer ranks. Started in
    another way, the loop is an ordinary one.

    Make it on all ranks, right after the optimizer. Between ``commsched.init()`` and this call, a script may make no collective
    calls but those of the optimizer.

    Args:
        optimizer: a ``ScheduledOptimizer`` of PyTorch or numpy, or an optimizer that the ``Accelerator`` of
            ``commsched.plugins.accelerate`` has prepared.
        also: objects whose ``state_dict()`` belongs to the state after a step. It may hold numbers, text, None, and lists,
            tuples and dicts of these.
        keep: where the values and the optimizer's state before a step's updates are kept, from which survivors of a loss go
            back. "device": beside them, as much memory once more. "cpu": in the host's memory, for a GPU that has no more;
            each update waits for the copy. "nothing": survivors can go on only if one of them has begun no update of the step,
            or made all of them; else the job ends. All ranks must say the same.

    Attributes:
        state: values of the script that belong to the state after a step, of the same kinds. All ranks must have the same.

    Raises:
        UnsupportedError: the optimizer is of another plugin.
        ConfigError: ``keep`` is none of these, or ranks differ in it; ``also`` is no list of such objects; there is an Elastic
            for the optimizer already.
    """

    def __init__(self, optimizer: ElasticOptimizer, also: Sequence[HasState] = (), keep: Keep = "device") -> None:
        part: ElasticPart | None = getattr(optimizer, "elastic_part", None)
        if part is None:
            raise UnsupportedError(
                f"a {type(optimizer).__name__} cannot be elastic; the ScheduledOptimizers of PyTorch and numpy can, and what "
                "the Accelerator of commsched.plugins.accelerate has prepared"
            )
        if keep not in get_args(Keep):
            raise ConfigError(f'keep={keep!r} of Elastic: it may be "device", "cpu" or "nothing"')
        _require_state(also)
        self.state: dict[str, Any] = {}
        self._keep = keep
        self._optimizer = part
        self._also = tuple(also)
        self._steps = 0  # made so far
        self._noted: dict[int, tuple[Any, str]] = {}  # by number of steps, those that this rank may go back to
        self._has_begun = False
        self._was_entered = True  # each step so far, by ``with``
        self._leaves = False
        self._is_elastic = part.session.place is not None
        if self._is_elastic:
            part.begin_undo(keep)
            self._share()
            try:
                self._await_all()
            except CommschedError as error:
                if not _is_of_lost_ranks(error, self.session):
                    raise  # else this process has all values, and the first step finds the loss

    @property
    def session(self) -> Session:
        """The session of now. Each generation of ranks has another one."""
        return self._optimizer.session

    def leave(self) -> None:
        """Let this process end after the step in hand: the loop raises ``SystemExit(0)``. The others go on with a new process
        in its place, or without one, and that is no failure. SIGTERM calls it while the loop runs, unless the script handles
        that signal itself. Any thread, and signal handlers. Does nothing in a job that is not elastic."""
        self._leaves = True

    def steps(self, count: int, first: int = 0) -> Iterator[ElasticStep]:
        """Yield one step after another, up to that with the number ``count`` - 1. A step that was broken off by a loss comes
        again, unless another rank has finished it.

        Args:
            first: the number of the first step of the job, if the script has loaded the values from before it, on all ranks. A
                new process begins with the step of the others all the same.

        Raises:
            CommschedError: the job cannot go on, or failed for another reason than a lost rank.
            ConfigError: there was a loop before, which a new process would make, too.
        """
        if self._has_begun:
            raise ConfigError(
                "there may be one loop over Elastic.steps(): a new process could not find its way to a second one"
            )
        self._has_begun = True
        place = self.session.place
        if place is None or place.generation == 1:
            self._steps = first
        forget = self._leave_at_sigterm()
        try:
            yield from self._each(count)
        finally:
            forget()

    def _leave_at_sigterm(self) -> Callable[[], None]:
        """Let SIGTERM call :meth:`leave`, until the returned function is called."""
        here, process = signal.SIGTERM, os.getpid()
        if not self._is_elastic or threading.current_thread() is not threading.main_thread():
            return lambda: None
        if signal.getsignal(here) is not signal.SIG_DFL:
            return lambda: None  # the script's own handler may call it

        def on_signal(number: int, frame: object) -> None:
            if os.getpid() == process:
                self.leave()
            else:  # a forked process, such as a data loader's, has inherited this handler
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(here, on_signal)

        def forget() -> None:
            with suppress(ValueError):  # the interpreter has ended the loop in another thread
                signal.signal(here, signal.SIG_DFL)

        return forget

    def _each(self, count: int) -> Iterator[ElasticStep]:
        is_new_world = True
        while True:
            lost: BaseException | None = None
            self._note()
            if self._steps < count and self._is_elastic and self._leaves:
                self._leave()
            membership = self.session.membership
            if self._steps < count and membership is not None and membership.is_summoned:
                lost = self._complete_updates()
            elif self._steps < count:
                step = ElasticStep(self._steps, self.session, is_new_world)
                yield step
                self._tell_if_not_entered(step)
                lost = step._lost or self._unnoticed()
                if lost is None:
                    self._steps += 1
                    is_new_world = False
                    continue
            else:
                try:
                    self._finish()
                    return
                except CommschedError as error:
                    if not _is_of_lost_ranks(error, self.session):
                        raise
                    lost = error
            if not self._move_on(lost, count):
                return
            is_new_world = True

    def _tell_if_not_entered(self, step: ElasticStep) -> None:
        """Warn once if a script forgets ``with step:``, which would show at the first loss only."""
        if self._was_entered and not step._is_entered:
            log.warning(
                "rank %d: step %d of Elastic.steps() was not entered: put what a step does into 'with step:', or a loss within "
                "it ends the job",
                step.rank,
                step.number,
            )
        self._was_entered = self._was_entered and step._is_entered

    def _leave(self) -> None:
        """End this process. The others may finish the last step, for which they need what is left of this rank's session."""
        self._complete_updates()
        say_farewell(Asked(leaves=True))
        with suppress(CommschedError):  # the others have begun a step without this rank, which ends the session for all
            self.session.close()
        raise SystemExit(0)

    def _complete_updates(self) -> CommschedError | None:
        """Make the updates of the step in hand. Return the loss of other ranks, if that prevents it."""
        try:
            self._optimizer.synchronize()
        except CommschedError as error:
            if not _is_of_lost_ranks(error, self.session):
                raise
            return error
        return None

    def _note(self) -> None:
        """Remember what belongs to the state after the steps made so far."""
        if not self._is_elastic:
            return
        earlier = self._optimizer.begin_step(self._steps)
        kept = {earlier: self._noted[earlier]} if earlier in self._noted else {}
        self._noted = {**kept, self._steps: (self._optimizer.note(), self._pack())}

    def _unnoticed(self) -> BaseException | None:
        """The loss of other ranks if the block has ended without an error all the same: the script may have caught it."""
        failure = self.session.failure if self._is_elastic else None
        if failure is not None and not _is_of_lost_ranks(failure, self.session):
            raise failure
        return failure

    def _pack(self) -> str:
        """Return, as text, what belongs to a step besides the model and the optimizer."""
        also = [
            _packed(each.state_dict(), f"the state_dict() of a {type(each).__name__} in also= of Elastic")
            for each in self._also
        ]
        return json.dumps([also, _packed(self.state, "Elastic.state")])

    def _unpack(self, packed: str) -> None:
        also, state = json.loads(packed)
        for each, values in zip(self._also, also):
            self._optimizer.load(each, _unpacked(values))
        self.state.clear()
        self.state.update(_unpacked(state))

    def _finish(self) -> None:
        """Make the last updates, and wait until all ranks have: until then, one that is lost needs the others."""
        self._optimizer.synchronize()
        if self._is_elastic:
            self.session.gather(None, "to end an elastic loop")
            say_farewell(Asked(self._steps, is_over=True, is_done=True))

    def _move_on(self, lost: BaseException | None, count: int) -> bool:
        """Take part in the next generation. False: all steps are made, so that there is none. ``lost`` is None if no rank was
        lost, but some have come."""
        began = time.monotonic()
        session = self.session
        failure = session.failure
        if failure is not None:
            said = str(failure).removesuffix(FEWER_BATCHES)  # ranks that leave have got SIGTERM, mostly
            log.warning("rank %d, step %d: %s: %s", session.rank, self._steps, type(failure).__name__, said)
        session.abort("the launcher has called for another generation")
        if self._leaves:
            say_farewell(Asked(leaves=True))
            raise SystemExit(0)
        steps = self._optimizer.leave()
        keeps_nothing = steps is None
        _clear_frames(lost, failure)
        while True:
            is_over = steps is not None and steps >= count
            try:
                rank = failure.rank if isinstance(failure, TransportError) else None
                was_silent = isinstance(failure, PeerTimeout) and failure.server is None
                moved = move_on(Asked(steps, is_over, rank, was_silent, keeps_nothing=keeps_nothing))
            except CommschedError as error:
                if self._leaves:  # so do all, since the launcher has got the signal too
                    raise SystemExit(0) from None
                raise error from lost
            if moved is None:
                self._go_back(count)
                return False
            assert moved.place is not None
            try:
                steps = self._kept(steps, moved.rank == moved.root)
                keeps_nothing = steps is None and self._keep == "nothing"
                self._optimizer.move(moved)
                self._share()
                steps, keeps_nothing = moved.place.steps, False
                self._optimizer.begin_anew(steps)
                self._noted.clear()
                self._note()
                self._await_all()
            except CommschedError as error:
                if not _is_of_lost_ranks(error, moved):
                    raise
                failure = moved.failure
                moved.abort("a rank was lost")
                self._optimizer.leave()
                continue
            if moved.rank == moved.root:
                log.warning("training goes on from step %d, after %.1f s", self._steps, time.monotonic() - began)
            return True

    def _kept(self, steps: int | None, is_root: bool) -> int | None:
        """Go back to the result of ``steps`` steps, and keep it while the root's replaces it: if the root is lost before all
        have that, others have theirs. Return None if this rank has no result to keep."""
        if steps is None:
            return None
        try:
            self._go_back(steps)
        except UnsupportedError:
            if is_root:
                raise
            return None
        return steps if self._optimizer.keep() or is_root else None  # the root's values stay in place anyway

    def _go_back(self, steps: int) -> None:
        noted, packed = self._noted[steps]
        self._optimizer.go_back(steps, noted)
        self._unpack(packed)
        self._steps = steps

    def _share(self) -> None:
        """Give all ranks what the root has besides the model and the optimizer. Collective."""
        session = self.session
        assert session.place is not None
        self._steps = session.place.steps
        is_root = session.rank == session.root
        data = b""
        if is_root:
            hyper_parameters = _packed(self._optimizer.hyper_parameters(), "a group of the optimizer")
            data = json.dumps([hyper_parameters, self._pack()]).encode()
        told = session.gather([len(data), len(self._also), self._keep], "to begin an elastic loop")
        require_same(
            [keep for _, _, keep in told],
            lambda different: f"keep= of Elastic is {different.text(repr)}; give all ranks the same",
            ConfigError,
        )
        if told[session.root][1] != len(self._also):
            raise UnsupportedError(f"also= of Elastic has {len(self._also)} objects here, {told[session.root][1]} elsewhere")
        received = bytearray(data if is_root else told[session.root][0])
        session.broadcast("the state of an Elastic", memoryview(received), session.root)
        if not is_root:
            hyper_parameters, packed = json.loads(received)
            self._unpack(packed)
            self._optimizer.set_hyper_parameters(_unpacked(hyper_parameters))

    def _await_all(self) -> None:
        """Wait until all ranks have the root's values. So a rank that is lost in its first step takes no values with it."""
        self.session.gather(None, "to begin the steps")


def _require_state(also: object) -> None:
    if not isinstance(also, Sequence) or isinstance(also, str):
        raise ConfigError(f"also= of Elastic is a {type(also).__name__}; it may be a list, such as also=[scheduler]")
    for each in also:
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(each, name, None)):
                raise ConfigError(f"also= of Elastic holds a {type(each).__name__}, which has no {name}()")


def _is_of_lost_ranks(error: BaseException, session: Session) -> bool:
    """Whether ``error`` is a consequence of the loss of other ranks or servers, which an elastic job outlives."""
    if session.place is None or not is_consequence(error):
        return False
    session.await_failure(timeouts.RAISE_SECONDS)
    return session.failed_elsewhere


def _clear_frames(*errors: BaseException | None) -> None:
    """Free the variables of the functions that ``errors`` have ended. They refer to the memory of a session that has ended, and
    a script may keep that session, which has its failure."""
    seen: set[int] = set()
    left = list(errors)
    while left:
        error = left.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            left += [error.__cause__, error.__context__]


def _packed(value: Any, what: str) -> Any:
    """``value`` as JSON that :func:`_unpacked` turns into an equal value. JSON has neither tuples nor numbers as keys."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        kind = "Counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_packed(key, what), _packed(item, f"{what}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [_packed(item, what) for item in value]}
    raise UnsupportedError(
        f"{what} holds a {type(value).__name__}; it may hold numbers, text, None, and lists, tuples and dicts of these"
    )


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, dict):
        return packed
    [(kind, items)] = packed.items()
    if kind == "list":
        return [_unpacked(item) for item in items]
    if kind == "tuple":
        return tuple(_unpacked(item) for item in items)
    unpacked = {_unpacked(key): _unpacked(item) for key, item in items}
    return Counter(unpacked) if kind == "Counter" else unpacked
