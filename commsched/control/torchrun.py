"""Ranks that torchrun started on several machines find rank 0 through torchrun's own store, where no address is set.

Rank 0 writes an offer, with its address and a public key. Each other rank asks with a public key of its own, and gets the job's
token sealed for that key. So the token never lies in the store, which answers everybody who can reach its port. Whoever writes
there on purpose can still pose as a rank. A rank whose place was taken notices, and does not join.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import NamedTuple, Protocol

from ..core.errors import ConfigError, PeerLost, PeerTimeout
from ..core.world import World
from ..net.sealed import SECRET_BYTES, OneTimeKey
from ..settings import Settings, parse_address
from .rendezvous import Endpoint, bracketed, is_listening, own_host, read_token, require_no_loopback, require_strong

log = logging.getLogger("commsched")

_POLL_SECONDS = 0.05
_OFFER = "offer"


class KeyValues(Protocol):
    """What is used of a ``torch.distributed.Store``. Its ``get`` waits for a key that is missing, so ask ``check`` before."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class StorePlace(NamedTuple):
    """Where torchrun's store listens. Every rank of the job can reach it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def store_place(world: World, settings: Settings, environ: Mapping[str, str]) -> StorePlace | None:
    """Where the store is through which this job's ranks can find each other. None if they do not need it, or there is none:
    without torchrun's agent, nobody has a store before ``torch.distributed`` is initialised."""
    if world.launcher != "torchrun" or world.one_machine or settings.control is not None:
        return None
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not environ.get("MASTER_PORT", "").isdecimal():
        return None
    return StorePlace(environ["MASTER_ADDR"], int(environ["MASTER_PORT"])) if "MASTER_ADDR" in environ else None


def open_torchrun_store(place: StorePlace, settings: Settings) -> TorchrunStore:
    """Connect to torchrun's store.

    Raises:
        PeerTimeout: the store did not answer within ``join_within``.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        within = timedelta(seconds=settings.join_within)
        store = TCPStore(place.host, place.port, is_master=False, timeout=within, wait_for_workers=False)
    except RuntimeError as error:
        raise PeerTimeout(f"torchrun's store at {place} does not answer: {error}") from error
    return TorchrunStore(PrefixStore("commsched", store), place, settings)


class TorchrunStore:
    """One rank's end of the meeting in torchrun's store. Only this prefix of the names of its keys is used."""

    def __init__(self, store: KeyValues, place: StorePlace, settings: Settings) -> None:
        self._store = store
        self._place = place
        self._settings = settings

    def where_to_listen(self) -> Endpoint:
        """On rank 0: the address to bind, which is the one from which it reaches the store, and a token: a new one if none is
        set.

        Raises:
            ConfigError: other machines cannot reach the address; or there are parameter servers, which cannot learn a new
                token.
        """
        token = read_token(self._settings)
        if token is None and self._settings.servers:
            raise ConfigError("servers is set, but no token: set the same COMMSCHED_TOKEN on every rank and server")
        if self._settings.host is None:
            require_no_loopback(self._place.host, f"MASTER_ADDR={self._place.host!r}")
        address = f"{bracketed(own_host(self._settings, str(self._place)))}:0"
        token = token or secrets.token_hex(SECRET_BYTES)
        require_strong(token, address)
        return Endpoint(address, token)

    @contextmanager
    def offered(self, endpoint: Endpoint, world_size: int) -> Iterator[None]:
        """On rank 0: within the block, tell the other ranks the endpoint."""
        meeting = secrets.token_hex(8)
        key = OneTimeKey() if read_token(self._settings) is None else None
        self._store.set(_OFFER, json.dumps(_Offer(meeting, endpoint.address, "" if key is None else f"{key.public:x}")))
        ended = threading.Event()
        with ExitStack() as stack:
            stack.callback(self._withdraw)
            if key is not None:
                desk = threading.Thread(
                    target=self._answer,
                    args=(meeting, key, bytes.fromhex(endpoint.token), world_size, ended),
                    name="commsched-meeting",
                    daemon=True,
                )
                desk.start()
                stack.callback(desk.join)
                stack.callback(ended.set)
            yield

    def _answer(self, meeting: str, key: OneTimeKey, secret: bytes, world_size: int, ended: threading.Event) -> None:
        """Seal the token for each rank that asks: once per rank, for the first that asks as this rank."""
        missing, seen = set(range(1, world_size)), 0
        try:
            while missing:
                if (asked := self._store.add(_asked(meeting), 0)) == seen:
                    if ended.wait(_POLL_SECONDS):  # polls only while joining: the store tells nobody of a new key
                        return
                    continue
                seen = asked
                for rank in sorted(missing):
                    if ended.is_set():
                        return
                    if self._store.check([_question(meeting, rank)]):
                        missing.remove(rank)
                        self._answer_one(meeting, key, secret, rank)
        except RuntimeError as error:  # torchrun's agent has ended, and its store with it; the ranks that miss it say so
            log.info("rank 0 cannot use torchrun's store any more: %s", error)

    def _answer_one(self, meeting: str, key: OneTimeKey, secret: bytes, rank: int) -> None:
        try:
            their_public = int(self._store.get(_question(meeting, rank)), 16)
            sealed = key.seal(secret, their_public, _about(meeting, rank))
        except ValueError:
            return  # no rank of ours wrote this; the rank whose place it took will say so
        self._store.set(_reply(meeting, rank), sealed.hex())

    def _withdraw(self) -> None:
        try:
            self._store.set(_OFFER, "")
        except RuntimeError as error:
            log.info("rank 0 cannot use torchrun's store any more: %s", error)

    def find(self, rank: int) -> Endpoint:
        """On another rank: find rank 0's endpoint.

        An offer of an earlier round of torchrun, whose rank 0 has ended, is not answered. So this waits for the next offer too.
        If the token is set, nobody is asked for it, and the answer is that a process listens at the offered address.

        Raises:
            PeerTimeout: rank 0 did not answer within ``join_within``.
            PeerLost: the store is gone.
            ConfigError: a token is set on rank 0 but not here, or here but not there; or another program writes to the store.
        """
        try:
            return self._find(rank)
        except RuntimeError as error:
            raise PeerLost(f"rank {rank} cannot use torchrun's store at {self._place} any more: {error}") from error

    def _find(self, rank: int) -> Endpoint:
        join_within = self._settings.join_within
        own_token = read_token(self._settings)
        key, asked, seen = OneTimeKey(), None, ""
        meet_by = time.monotonic() + join_within
        why = "rank 0 does not say where it listens"
        while time.monotonic() < meet_by:
            offer = _read_offer(self._store)
            if offer is not None and own_token is not None:
                _require_same_choice(offer, own_token)
                if is_listening(offer.address):
                    return Endpoint(offer.address, own_token)
                why = f"rank 0 does not answer at {offer.address}"
            elif offer is not None and offer.meeting != seen:
                seen = offer.meeting
                _require_same_choice(offer, own_token)
                asked = offer if self._ask(seen, rank, key) else None
                why = f"another process has asked as rank {rank}" if asked is None else "rank 0 does not answer"
            if asked is not None and self._store.check([_reply(asked.meeting, rank)]):
                return Endpoint(asked.address, self._opened(asked, rank, key))
            time.sleep(_POLL_SECONDS)  # polls only while joining: the store tells nobody of a new key
        raise PeerTimeout(f"rank {rank} waited {join_within:g} s in torchrun's store at {self._place}: {why}")

    def _ask(self, meeting: str, rank: int, key: OneTimeKey) -> bool:
        """Ask as ``rank``. False if another process has: of torchrun's earlier round, or a stranger."""
        mine = f"{key.public:x}"
        if self._store.compare_set(_question(meeting, rank), "", mine).decode() != mine:
            return False
        self._store.add(_asked(meeting), 1)
        return True

    def _opened(self, offer: _Offer, rank: int, key: OneTimeKey) -> str:
        try:
            sealed = bytes.fromhex(self._store.get(_reply(offer.meeting, rank)).decode())
            return key.open(sealed, int(offer.public, 16), _about(offer.meeting, rank)).hex()
        except ValueError as error:
            raise ConfigError(
                f"the answer to rank {rank} in torchrun's store at {self._place} is not rank 0's ({error}): another program "
                "writes to that store; set the same COMMSCHED_TOKEN on every rank, and see who can reach the port"
            ) from error


class _Offer(NamedTuple):
    """``meeting``: a new name for each time that rank 0 meets the others. ``public``: rank 0's key as hexadecimal digits; "" if
    the token is set, and only the address travels."""

    meeting: str
    address: str
    public: str


def _read_offer(store: KeyValues) -> _Offer | None:
    """The offer; None if there is none, or if what is there is none of ours."""
    try:
        meeting, address, public = json.loads(store.get(_OFFER) if store.check([_OFFER]) else "null")
        return _Offer(str(meeting), parse_address(address), str(public))
    except (ValueError, TypeError, RecursionError, ConfigError):
        return None


def _require_same_choice(offer: _Offer, own_token: str | None) -> None:
    if (own_token is None) != bool(offer.public):
        who, other = ("rank 0", "this rank") if own_token is None else ("this rank", "rank 0")
        raise ConfigError(
            f"a token is set on {who}, and not on {other}: set the same COMMSCHED_TOKEN on every rank, or on none"
        )


def _asked(meeting: str) -> str:
    return f"{meeting}/asked"


def _question(meeting: str, rank: int) -> str:
    return f"{meeting}/question/{rank}"


def _reply(meeting: str, rank: int) -> str:
    return f"{meeting}/reply/{rank}"


def _about(meeting: str, rank: int) -> str:
    return f"token of {meeting} for rank {rank}"
