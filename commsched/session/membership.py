"""This process's membership in an elastic job: it asks the launcher for its place, and opens the session of each generation."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from ..control.elastic_messages import Answer, Finish, Listens, Place, RankEnded, Refused, Summoned, from_line, to_line
from ..control.generations import Asked, GiveUp
from ..control.rendezvous import Endpoint, bracketed, read_token
from ..core.errors import ConfigError, PeerLost, PeerTimeout, TransportError
from ..core.interfaces import OnFailure
from ..core.world import World
from ..settings import Settings
from .opening import open_session
from .session import Session

log = logging.getLogger("commsched")


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Another name of ``path``, for a Unix socket: the system takes some 100 characters only."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


#: The variable that holds the path of the socket at which the launcher answers this process.
ELASTIC = "COMMSCHED_ELASTIC"

_LAUNCHER = "commsched run --elastic"
_LAUNCHER_ENDED = f"{_LAUNCHER} does not answer any more: it has ended"
_JOIN_SECONDS = 10.0


def require_can_be_elastic(settings: Settings) -> None:
    """Raises ConfigError if a setting cannot be used in an elastic job."""
    if settings.transport not in ("auto", "ps", "gloo"):
        raise ConfigError(f"transport={settings.transport!r} cannot be used with --elastic, which works over ps and gloo only")
    for name in ("trace", "tune"):
        if getattr(settings, name):
            raise ConfigError(f"{settings.text_of(name)} cannot be used with --elastic")


class ElasticMember:
    """Opens one session after the other for this process, which has one member for as long as it lives.

    Args:
        path: of the launcher's socket for this process.
        settings, device: for every session.

    Attributes:
        is_summoned: the launcher asks this process to end its session after the step in hand, for another generation.

    Raises:
        ConfigError: a setting cannot be used in an elastic job, or there is no token.
    """

    def __init__(self, path: str, settings: Settings, device: str) -> None:
        require_can_be_elastic(settings)
        token = read_token(settings)
        if token is None:
            raise ConfigError(f"COMMSCHED_TOKEN is missing, which {_LAUNCHER} has set")
        self._token = token  # read once: all generations must have the same
        self.is_summoned = False
        self._path = path
        self._connection: socket.socket | None = None  # with the launcher, as long as this process lives
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()  # None stands for the end
        self._listens: SimpleQueue[Listens | RankEnded | None] = SimpleQueue()
        self._lock = threading.Lock()  # guards the two below
        self._ended: RankEnded | None = None  # the last that was heard of
        self._opens: tuple[int, OnFailure] | None = None  # the generation that is being opened, and what breaks that off
        self._settings = settings
        self._device = device

    def move(self, asked: Asked) -> Session | None:
        """Take part in the next generation that begins. None: all steps are made, and no generation follows. Collective.

        Raises:
            TransportError: the job cannot go on.
            CommschedError: see ``open_session``.
        """
        while True:
            place = self._ask(asked)
            if place is None:
                return None
            try:
                return self._open(place)
            except TransportError as error:  # a rank was lost while the generation began; the launcher bounds how often
                log.warning("rank %d: generation %d did not begin: %s", place.rank, place.generation, error)
                asked = replace(asked, lost=None, was_silent=False)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        with short_path(Path(self._path)) as path:
            connection.connect(path)
        threading.Thread(target=self._listen, args=(connection,), name="commsched-member", daemon=True).start()
        return connection

    def _listen(self, connection: socket.socket) -> None:
        """Take what the launcher says, until it or this process ends."""
        with suppress(OSError, ValueError), connection.makefile("rb") as file:
            for line in file:
                answer = from_line(line)
                if isinstance(answer, RankEnded):
                    self._break_off(answer)
                if isinstance(answer, RankEnded | Listens):
                    self._listens.put(answer)
                    continue
                self.is_summoned = isinstance(answer, Summoned)
                if not self.is_summoned:
                    self._answers.put(answer)
        self._answers.put(None)
        self._listens.put(None)

    def _break_off(self, ended: RankEnded) -> None:
        with self._lock:
            self._ended, opens = ended, self._opens
        if opens is not None and opens[0] == ended.generation:
            opens[1](_lost(ended))

    def _when_lost(self, generation: int, lost: OnFailure) -> None:
        """Call ``lost`` when ``generation``, which is being opened, loses a rank or a server. It may have done so already."""
        with self._lock:
            self._opens, ended = (generation, lost), self._ended
        if ended is not None and ended.generation == generation:
            lost(_lost(ended))

    def _ask(self, asked: Asked) -> Place | None:
        """Ask the launcher for a place in the next generation, and wait until all ranks have asked. None: all steps are made.

        Raises:
            PeerLost: the launcher has ended.
            ConfigError: another process has the rank's place.
            TransportError: the job cannot go on.
        """
        answer = None
        with suppress(OSError):
            self._connection = self._connection or self._connect()
            self._connection.sendall(to_line(asked))
            answer = self._answers.get()
        if isinstance(answer, Refused):
            raise ConfigError(answer.why)
        if isinstance(answer, GiveUp):
            raise TransportError(f"the job cannot go on: {answer.why}")
        if isinstance(answer, Place | Finish):
            return answer if isinstance(answer, Place) else None
        raise PeerLost(_LAUNCHER_ENDED)

    def _open(self, place: Place) -> Session:
        world = World(place.rank, place.world_size, place.local_rank, place.local_world_size, launcher=_LAUNCHER)
        transport = "ps" if self._settings.transport == "auto" else self._settings.transport
        # All processes have just asked, so those that do not join at once have died since.
        within = min(self._settings.join_within, max(_JOIN_SECONDS, self._settings.fail_after))
        settings = replace(
            self._settings,
            transport=transport,
            control=None,
            token=self._token,
            token_file=None,
            job=place.job,
            servers=place.servers,
            join_within=within,
            # It was tuned for the ranks and hosts of the first generation, and the sizes stay.
            tuned=self._settings.tuned if place.generation == 1 else None,
        )
        meeting = _AtLauncher(self, place, within)
        try:
            session = open_session(world, settings, self._device, meeting, partial(self._when_lost, place.generation))
        finally:
            with self._lock:
                self._opens = None  # from here on the control channel finds losses
        session.membership, session.place = self, place
        return session

    def _say(self, listens: Listens) -> None:
        """Tell the launcher, for the other ranks, where rank 0 listens."""
        assert self._connection is not None
        try:
            self._connection.sendall(to_line(listens))
        except OSError as error:
            raise PeerLost(_LAUNCHER_ENDED) from error

    def _hear(self, generation: int, within_seconds: float) -> str:
        """Return the address at which rank 0 of ``generation`` listens."""
        deadline = time.monotonic() + within_seconds
        while True:
            try:
                listens = self._listens.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise PeerTimeout(f"rank 0 did not say within {within_seconds:g} s where it listens") from None
            if listens is None:
                self._listens.put(None)
                raise PeerLost(_LAUNCHER_ENDED)
            if listens.generation == generation:
                if isinstance(listens, RankEnded):
                    raise _lost(listens)
                return listens.address


def _lost(ended: RankEnded) -> PeerLost:
    return PeerLost(ended.why, rank=ended.rank)


class _AtLauncher:
    """The meeting of the ranks of one generation, at their launchers. See ``opening.MeetingPlace``."""

    def __init__(self, member: ElasticMember, place: Place, within_seconds: float) -> None:
        self._member = member
        self._place = place
        self._within_seconds = within_seconds

    def where_to_listen(self) -> Endpoint:
        return Endpoint(f"{bracketed(self._place.host)}:0", self._member._token)

    @contextmanager
    def offered(self, endpoint: Endpoint, world_size: int) -> Iterator[None]:
        self._member._say(Listens(self._place.generation, endpoint.address))
        yield

    def find(self, rank: int) -> Endpoint:
        return Endpoint(self._member._hear(self._place.generation, self._within_seconds), self._member._token)
