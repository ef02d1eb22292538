"""Where process groups meet, and whose listening sockets are closed to strangers."""

from __future__ import annotations

import socket
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

from commsched.core.errors import PeerLost, TransportError
from commsched.session.local import LocalControlWorld
from commsched.testing.world import run_world
from commsched.transports.backends.gloo.meeting import GatherStore, ListeningSocket, _as_gloo_writes


class Gathering:
    """Rank 1's answers to what rank 0 gathers: first the beginnings of values, then their ends of 8 bytes."""

    def __init__(self, *answers: dict[str, str]) -> None:
        self.answers = [
            part
            for answer in answers
            for part in ({key: value[:-16] for key, value in answer.items()}, [value[-16:] for value in answer.values()])
        ]
        self.asked: list[Any] = []

    def __call__(self, value: Any) -> list[Any]:
        self.asked.append(value)
        return [value, self.answers.pop(0)]


def test_what_ranks_have_set_travels_once() -> None:
    gather = Gathering({"b": b"\0theirs and 8 bytes".hex()})
    store = GatherStore(gather, 1)
    store.set("a", b"\xffmine")
    assert store.get("b") == b"\0theirs and 8 bytes"
    assert store.get("a") == b"\xffmine"
    store.wait(["a", "b"])
    assert gather.asked == [{"a": ""}, [b"\xffmine".hex()]]


def test_the_numbers_at_the_end_of_gloos_addresses_are_equal_on_all_ranks() -> None:
    """So rank 0 sends them once."""
    import torch.distributed

    dist: Any = torch.distributed
    gathered: list[list[Any]] = []

    def connect(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            everybodys = control.ends[rank].gather_next(value)
            if rank == 0:
                gathered.append(everybodys)
            return everybodys

        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=False)
        for _ in range(2):
            options = dist.ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = [device], 1, timedelta(seconds=60)
            groups.append(dist.ProcessGroupGloo(GatherStore(gather, 3), rank, 3, options))

    groups: list[Any] = []
    control = LocalControlWorld(3)
    run_world(3, connect)
    for end in control.ends:
        end.close()
    assert [len(set(map(str, everybodys))) for everybodys in gathered] == [3, 1, 3, 1]


def test_what_is_set_later_travels_with_the_next_question() -> None:
    store = GatherStore(Gathering({"1": "00"}, {"1": "00", "2": "01"}), 1)
    assert store.get("1") == b"\0"
    store.set("own", "text")
    store.wait(["2", "own"])
    assert store.get("own") == b"text"


def test_a_key_that_no_rank_has_set_is_an_error_and_no_wait() -> None:
    store = GatherStore(Gathering({}), 1)
    with pytest.raises(TransportError, match=r"gloo asks for 'c', which no rank has set: is it the same version everywhere\?"):
        store.wait(["c"])


def test_a_failure_of_the_job_comes_through_the_process_group() -> None:
    from torch.distributed import ProcessGroupGloo

    def gather(value: Any) -> list[Any]:
        raise PeerLost("rank 1 is gone")

    with pytest.raises(PeerLost, match="rank 1 is gone"):
        ProcessGroupGloo(GatherStore(gather, 2), 0, 2, timedelta(seconds=5))


def test_who_begins_to_listen_meanwhile_is_left_alone() -> None:
    listener = ListeningSocket(lambda: [socket.create_server(("127.0.0.1", 0)) for _ in range(2)])
    ours, other = listener.made
    with closing(ours), closing(other), closing(listener):
        listener.ignore_strangers(_as_gloo_writes(ours))
        with pytest.raises(TimeoutError):
            socket.create_connection(ours.getsockname(), timeout=0.05)
        socket.create_connection(other.getsockname(), timeout=60).close()
