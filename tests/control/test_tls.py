"""The control channel with ``security=tls``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from commsched.control.client import ControlClient
from commsched.control.messages import Member
from commsched.control.server import ControlServer
from commsched.core.errors import ConfigError, PeerLost
from commsched.net.tls import Identity

from ..net.relay import Relay, nothing
from ..net.test_tls import of_token
from .world import PATIENCE_SECONDS, TOKEN, Recorder

SLOW = {"fail_after_seconds": 30.0, "join_within_seconds": PATIENCE_SECONDS}
SECRET = "what rank 1 tells"


@contextmanager
def a_job(
    change: Callable[[str, bytes], bytes] = nothing, *, secured: bool = True
) -> Iterator[tuple[Relay, list[ControlClient]]]:
    """Two ranks that have joined, and who hears what rank 1 says to rank 0."""
    identities = [of_token(TOKEN) if secured else None for _ in range(2)]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(2))
        server = stack.enter_context(closing(ControlServer("127.0.0.1:0", TOKEN, 2, **SLOW, identity=identities[0])))
        relay = stack.enter_context(closing(Relay(server.address, change)))
        first = pool.submit(ControlClient, server.address, TOKEN, Member.rank(0, 2), **SLOW, server=server)
        second = ControlClient(relay.address, TOKEN, Member.rank(1, 2), **SLOW, identity=identities[1])
        clients = [first.result(PATIENCE_SECONDS), second]
        for client in clients:
            stack.callback(client.close)
        yield relay, clients


def tell(clients: list[ControlClient]) -> None:
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(client.gather, "g", f"{SECRET} {rank}") for rank, client in enumerate(clients)]
        assert all(each.result(PATIENCE_SECONDS) == [f"{SECRET} 0", f"{SECRET} 1"] for each in told)


@pytest.mark.parametrize("secured", [True, False])
def test_a_recorded_conversation_shows_what_is_said_only_without_tls(secured: bool) -> None:
    with a_job(secured=secured) as (relay, clients):
        tell(clients)
        heard = relay.heard["server"] + relay.heard["worker"]
        assert (SECRET.encode() in heard) is not secured
        assert TOKEN.encode() not in heard


def test_a_bit_that_somebody_changes_ends_the_job_by_name() -> None:
    armed = threading.Event()

    def flip(to: str, data: bytes) -> bytes:
        if not armed.is_set() or to == "worker":
            return data
        armed.clear()
        return data[:-1] + bytes([data[-1] ^ 1])

    with a_job(flip) as (_, clients):
        listeners = [Recorder(), Recorder()]
        for client, listener in zip(clients, listeners):
            client.listen(listener)
        armed.set()
        with pytest.raises(PeerLost):
            clients[1].gather("g", SECRET)
        for listener, gone in zip(listeners, (1, 0)):
            failure = listener.failure()
            assert isinstance(failure, PeerLost)
            assert str(failure).startswith(f"rank {gone} (")
            assert "is gone" in str(failure)


def refusal(member: Identity | None, rank_0: Identity | None, token: str = TOKEN) -> str:
    """What a rank is told at once that comes with other settings than rank 0, without the address."""
    with closing(ControlServer("127.0.0.1:0", TOKEN, 2, **SLOW, identity=rank_0)) as server:
        with pytest.raises(ConfigError) as refused:
            ControlClient(server.address, token, Member.rank(1, 2), **SLOW, identity=member)
        return str(refused.value).replace(server.address, "HERE")


def test_a_setting_that_one_rank_lacks_is_named() -> None:
    assert (
        refusal(None, of_token()) == "the program that listens at HERE speaks TLS only; give all ranks and servers security=tls"
    )
    assert refusal(of_token(), None) == (
        "the program that listens at HERE does not speak TLS; give all ranks and servers security=tls"
    )


def test_another_token_is_named() -> None:
    assert refusal(of_token("another token"), of_token(TOKEN), "another token") == (
        "the program that listens at HERE does not prove that it belongs to this job (certificate signature failure); set the "
        "same COMMSCHED_TOKEN everywhere, or another program is there"
    )


def test_who_sits_between_without_the_token_is_named() -> None:
    """A man in the middle who ends the encryption himself needs a certificate that he cannot make."""
    middle = of_token("a guess")
    assert "does not prove that it belongs to this job" in refusal(of_token(TOKEN), middle)
