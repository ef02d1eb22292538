"""The session of this process: set up from its launcher's variables, opened once, closed at exit."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Unpack

from ..control.generations import Asked
from ..core import process_exit
from ..core.errors import CommschedError, ConfigError, TransportError, UnsupportedError, error_text, ranks_text
from ..core.interrupted import is_held_here
from ..core.standard_streams import flush_all, occupy
from ..core.world import World, detect_world
from ..settings import Settings, SettingsKeywords, parse_switch
from . import opening
from .log import NOTHING_MADE, say
from .membership import ELASTIC, ElasticMember
from .opening import open_session
from .process_end import is_consequence, let_the_cause_end_first, record, shorten, unhandled
from .session import Session

log = logging.getLogger("commsched")

#: Time in which a rank should raise the job's failure; after it, the failure is logged.
_NOTICE_SECONDS = 1.0

_lock = threading.RLock()  # a signal handler may come here in a thread that has it
_current: Session | None = None
_member: ElasticMember | None = None  # of an elastic job, as soon as this process has asked for a place


def init(*, device: str = "cpu", world: World | None = None, **settings: Unpack[SettingsKeywords]) -> Session:
    """Return the session of this process. The first call, and the first call after a session has closed, joins the job and
    waits until every rank has joined. Any thread.

    The session is closed when the interpreter exits; if an exception ends this process, it is reported to the other ranks.
    Rank and world size come from the launcher of the process (commsched run, torchrun, mpirun, srun). With one rank, or with
    ``disable``, the session needs no network.

    Args:
        device: device of the gradients ("cpu", or as PyTorch names it), for ``transport=auto``; plugins set it.
        world: rank and world size, from plugins of engines that start ranks themselves.
        settings: the settings that ``commsched.settings.SettingsKeywords`` lists with their types, so that an editor and a type
            checker know them. Each may also come from ``COMMSCHED_<NAME>`` or from a TOML file named by ``COMMSCHED_CONFIG``.

    Raises:
        ConfigError: a setting is wrong or differs between ranks, settings are given after the session was opened, ``world``
            differs from the world that ``commsched run`` made, this process has called it in an elastic job before, or it is
            called while multiprocessing imports a rank's script anew.
        PeerTimeout: not every rank joined in time; names the missing ranks.
    """
    global _current, _member
    if is_held_here(_lock):
        if _current is not None and not _current.closed and world is None and not settings:
            return _current
        raise UnsupportedError("a signal handler or a finalizer calls commsched.init(), and has interrupted commsched")
    with _lock:
        if _current is not None and not _current.closed:
            given = [*(["world"] if world is not None else []), *settings]
            if given:
                raise ConfigError(f"commsched is already initialised; give {', '.join(given)} at the first call of init")
            return _current
        world = detect_world(os.environ) if world is None else _agreed_with_launcher(world)
        occupy()
        process_exit.watch()
        shorten(world.rank)
        loaded = Settings.load(settings, os.environ)
        if world.world_size > 1 and not loaded.disable:
            _require_first_import(world)
        if not _is_elastic(world):
            session = open_session(world, loaded, device)
        elif _member is not None:
            raise ConfigError(
                "this process has asked for its place in the elastic job before, and can do so only once: keep the session, or "
                "end the process"
            )
        else:
            _member = ElasticMember(os.environ[ELASTIC], loaded, device)
            joined = _member.move(Asked())
            if joined is None:
                raise TransportError("the job has made all its steps, and does not need this process any more")
            session = joined
        _current = session
        session.when_failed(partial(_say_if_unnoticed, session))
        end_first()
        return session


def _require_first_import(world: World) -> None:
    """Raise ConfigError while a process that a rank has spawned, such as a data loader's worker, imports the rank's script. It
    has the rank's variables, and would join the job in its name, or make another job with other such processes."""
    # multiprocessing itself asks this before it starts a process. A process that imported the script before may be a rank.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            f"this process, {os.getpid()}, was started by multiprocessing for rank {world.rank}, and imports its script or "
            "modules: it cannot join the job again. Let no import call commsched: put that call, and what follows it, into a "
            "function, or under if __name__ == '__main__':"
        )


def is_elastic() -> bool:
    """Whether ``commsched run --elastic`` has started this process, so that its session may be one of several generations. For
    plugins of libraries that must know before the session is opened."""
    return ELASTIC in os.environ and _is_elastic(detect_world(os.environ))


def _is_elastic(world: World) -> bool:
    return ELASTIC in os.environ and world.launcher == "commsched run" and world.world_size > 1


def move_on(asked: Asked) -> Session | None:
    """In an elastic job, after the session of this process has ended with its generation: open that of the next generation.
    None: all steps are made, and no generation follows.

    Raises:
        CommschedError: the job cannot go on.
    """
    global _current
    with _lock:
        if _current is None or _current.membership is None:
            raise ConfigError("this process has no session of an elastic job")
        _current = _current.membership.move(asked)
        if _current is not None:
            _current.when_failed(partial(_say_if_unnoticed, _current))
        return _current


def say_farewell(asked: Asked) -> None:
    """In an elastic job: tell the launcher that this process wants no further place, and why."""
    with _lock, suppress(CommschedError):  # a job that cannot go on gives no places anyway
        if _current is not None and _current.membership is not None:
            _current.membership.move(asked)


def end_first() -> None:
    """At exit, close the session before the exit handlers of all modules imported until now run. Plugins of engines that shut
    themselves down at exit call it when they are imported, since the session may have been opened before."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def shutdown() -> None:
    """Close the session of this process, if there is one; see ``Session.close``."""
    global _current
    with _lock:
        session, _current = _current, None
    if session is None:
        return
    try:
        session.close()
    finally:
        with _lock:
            if not session.closed and _current is None:  # a signal handler could not close it: it is closed at exit
                _current = session


def require_world_size(world_size: int, who: str) -> None:
    """Check the number of ranks that a library has counted by itself, before its plugin uses that number. Not collective. The
    check covers ``commsched run`` only, since libraries read the variables of other launchers themselves.

    Raises:
        ConfigError: ``commsched run`` has started another number of ranks than the library ``who`` has counted.
    """
    launched = _launched()
    if launched is not None and launched.world_size != world_size:
        raise ConfigError(
            f"{launched.launcher} started {launched.world_size} ranks, but {who} makes {world_size}; make them agree"
        )


def _agreed_with_launcher(world: World) -> World:
    """``world``; raises ConfigError if ``commsched run`` says that it is another."""
    launched = _launched()
    if launched is not None and (launched.rank, launched.world_size) != (world.rank, world.world_size):
        raise ConfigError(
            f"{launched.launcher} says that this is rank {launched.rank} of {launched.world_size}, but {world.launcher} "
            f"that it is rank {world.rank} of {world.world_size}; let one of them start the ranks"
        )
    return world


def _launched() -> World | None:
    """The world that ``commsched run`` made, if it started this process or an ancestor of it; otherwise None."""
    return detect_world(os.environ) if "COMMSCHED_RANK" in os.environ else None


def _say_if_unnoticed(session: Session, failure: CommschedError) -> None:
    """Log why the job failed if this rank does not notice: it may evaluate, or wait in a library that does not notice."""

    def say() -> None:
        if not session.closed and not session.has_raised:
            log.warning("rank %d: the job has failed: %s", session.rank, error_text(failure))

    timer = threading.Timer(_NOTICE_SECONDS, say)
    timer.name, timer.daemon = "commsched-unnoticed", True
    with suppress(RuntimeError):  # at the interpreter's end Python 3.12 starts no thread; then this rank is about to notice
        timer.start()


def _at_exit() -> None:
    """Close the session at exit, which drains the last tasks; so the number of steps need not be known. If an exception or an
    exit code ends this rank, report it to all ranks."""
    session, error = _current, unhandled()
    if session is None and error is None:
        _warn_if_nothing_was_averaged()
    if error is not None and not isinstance(error, KeyboardInterrupt) and not is_consequence(error):
        record(error, os.environ)
    failed_before = session is not None and session.failed_elsewhere
    if session is not None and not session.closed:
        _end(session)
    if is_consequence(error) or failed_before:
        let_the_cause_end_first(os.environ)


def _end(session: Session) -> None:
    if (ended_by := process_exit.error()) is not None:
        failure = session.failure
        session.abort(ended_by)
        if failure is not None and not session.has_raised:
            log.error("rank %d: the job had failed before: %s", session.rank, error_text(failure))
        elif failure is None and session.left:
            log.error("rank %d: %s had left the job before", session.rank, ranks_text(session.left))
        return
    try:
        session.close()
    except BaseException as failure:  # including an exception of a signal handler: the last averages may not be complete
        # The training script assumes that all went well; the launcher must not. An atexit handler cannot change the exit
        # code in any other way.
        log.error("rank %d: %s", session.rank, error_text(failure))
        flush_all()
        is_own = isinstance(failure, TransportError) and failure.rank == session.rank  # the others still needed this rank
        if is_consequence(failure) and not is_own:
            let_the_cause_end_first(os.environ)
        process_exit.leave(process_exit.code_of(failure))


def _warn_if_nothing_was_averaged() -> None:
    """Warn if a plugin was imported, but no session was ever opened: the script has the first of the two lines to add, but not
    the second."""
    environ = os.environ
    if opening.has_opened() or not any(name.startswith("commsched.plugins.") for name in sys.modules):
        return
    if "COMMSCHED_LAUNCHER_FILE" in environ:
        return  # commsched run prints this warning for all ranks
    if multiprocessing.parent_process() is not None:
        return  # a data loader's process
    try:
        world, disabled = detect_world(environ), parse_switch(environ.get("COMMSCHED_DISABLE", ""))
    except ConfigError:
        return  # the user has not asked for any of this
    if world.rank == 0 and world.world_size > 1 and not disabled:
        say(f"no rank joined the job, so nothing was averaged: each of {world.world_size} processes ran alone. {NOTHING_MADE}")


atexit.register(_at_exit)  # for a process that ends before it has a session; end_first registers it anew for a session
