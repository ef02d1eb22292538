"""Where process groups meet, and whose listening sockets are closed to strangers."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

from commsched.core.errors import PeerLost, TransportError
from commsched.transports.backends.gloo.meeting import GatherStore, ListeningSocket, _as_gloo_writes


class Gathering:
    """Rank 1's answers to what rank 0 gathers."""

    def __init__(self, *answers: dict[str, str]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, str]] = []

    def __call__(self, value: Any) -> list[Any]:
        self.asked.append(dict(value))
        return [value, self.answers.pop(0)]


def test_what_ranks_have_set_travels_once() -> None:
    gather = Gathering({"b": b"\0theirs".hex()})
    store = GatherStore(gather)
    store.set("a", b"\xffmine")
    assert store.get("b") == b"\0theirs"
    assert store.get("a") == b"\xffmine"
    store.wait(["a", "b"])
    assert gather.asked == [{"a": b"\xffmine".hex()}]


def test_what_is_set_later_travels_with_the_next_question() -> None:
    store = GatherStore(Gathering({"1": "00"}, {"1": "00", "2": "01"}))
    assert store.get("1") == b"\0"
    store.set("own", "text")
    store.wait(["2", "own"])
    assert store.get("own") == b"text"


def test_a_key_that_no_rank_has_set_is_an_error_and_no_wait() -> None:
    store = GatherStore(Gathering({}))
    with pytest.raises(TransportError, match=r"gloo asks for 'c', which no rank has set: is it the same version everywhere\?"):
        store.wait(["c"])


def test_a_failure_of_the_job_comes_through_the_process_group() -> None:
    from datetime import timedelta

    from torch.distributed import ProcessGroupGloo

    def gather(value: Any) -> list[Any]:
        raise PeerLost("rank 1 is gone")

    with pytest.raises(PeerLost, match="rank 1 is gone"):
        ProcessGroupGloo(GatherStore(gather), 0, 2, timedelta(seconds=5))


def test_who_begins_to_listen_meanwhile_is_left_alone() -> None:
    listener = ListeningSocket(lambda: [socket.create_server(("127.0.0.1", 0)) for _ in range(2)])
    ours, other = listener.made
    with closing(ours), closing(other), closing(listener):
        listener.ignore_strangers(_as_gloo_writes(ours))
        with pytest.raises(TimeoutError):
            socket.create_connection(ours.getsockname(), timeout=0.05)
        socket.create_connection(other.getsockname(), timeout=60).close()
