"""The session of this process: what its launcher says, opened once, closed at exit."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from typing import Any

from .core import process_exit
from .core.config import Settings
from .core.errors import ConfigError
from .core.world import World, detect_world
from .opening import open_session
from .session import Session

log = logging.getLogger("commsched")

_lock = threading.Lock()
_current: Session | None = None


def init(*, device: str = "cpu", world: World | None = None, **settings: Any) -> Session:
    """The session of this process; the first call, and the first after a session has closed, joins the job and waits until
    every rank has. Any thread; what exits the interpreter closes the session, or tells the others which exception did.

    Rank and world size come from what launched the process (commsched run, torchrun, mpirun, srun). With one rank, or with
    ``disable``, a session that needs no network. ``settings`` are the fields of ``core.config.Settings``; each may also come
    from ``COMMSCHED_<NAME>`` or a TOML file named by ``COMMSCHED_CONFIG``. ``device``: where the gradients lie ("cpu", or as
    PyTorch names it), for ``transport=auto``; plugins say it. ``world``: from plugins of engines that start ranks themselves.

    Raises:
        ConfigError: a setting is wrong or differs between ranks, settings are given after the session was opened, or ``world``
            is not what ``commsched run`` made.
        PeerTimeout: not every rank joined in time; names those missing.
    """
    global _current
    with _lock:
        if _current is not None and not _current.closed:
            given = [*(["world"] if world is not None else []), *settings]
            if given:
                raise ConfigError(f"commsched is already initialised; give {', '.join(given)} at the first call of init")
            return _current
        world = detect_world(os.environ) if world is None else _agreed_with_launcher(world)
        _current = open_session(world, Settings.load(settings, os.environ), device)
        end_first()
        return _current


def end_first() -> None:
    """At exit, close the session before all that was imported until now ends. For plugins of engines that end by themselves,
    when they are imported: the session may have been opened before."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def shutdown() -> None:
    """Close the session of this process, if there is one; see ``Session.close``."""
    global _current
    with _lock:
        session, _current = _current, None
    if session is not None:
        session.close()


def require_world_size(world_size: int, who: str) -> None:
    """For plugins of libraries that count ranks by themselves, before they use that number. Not collective; knows of
    ``commsched run`` only, as other launchers are the libraries' own to read.

    Raises:
        ConfigError: ``commsched run`` has started another number of ranks than ``who`` says there are.
    """
    launched = _launched()
    if launched is not None and launched.world_size != world_size:
        raise ConfigError(
            f"{launched.launcher} started {launched.world_size} ranks, but {who} makes {world_size}; let them agree"
        )


def _agreed_with_launcher(world: World) -> World:
    """``world``, unless ``commsched run`` says that it is another."""
    launched = _launched()
    if launched is not None and (launched.rank, launched.world_size) != (world.rank, world.world_size):
        raise ConfigError(
            f"{launched.launcher} says that this is rank {launched.rank} of {launched.world_size}, but {world.launcher} "
            f"that it is rank {world.rank} of {world.world_size}; let one of them start the ranks"
        )
    return world


def _launched() -> World | None:
    """The world that ``commsched run`` made, if it has started this process, or one that started it."""
    return detect_world(os.environ) if "COMMSCHED_RANK" in os.environ else None


def _at_exit() -> None:
    """The last drain, without being told the number of steps. An exception that ends this rank is told to all."""
    session = _current
    if session is None or session.closed:
        return
    ended_by = getattr(sys, "last_value", None)  # set by the interpreter when it printed an unhandled exception
    if ended_by is not None:
        session.abort(f"{type(ended_by).__name__}: {ended_by}")
        return
    try:
        session.close()
    except Exception as error:
        # The training script believes that all went well; the launcher must not. An atexit handler cannot change the exit
        # code in any other way.
        log.error("rank %d: %s: %s", session.rank, type(error).__name__, error)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        process_exit.leave(1)
