"""A bit that changes on the way: a real relay between worker and server changes one, and makes TCP's own checksums right."""

import re
import struct
from collections.abc import Callable
from contextlib import closing, contextmanager

import numpy as np
import pytest

from commsched.core.errors import ProtocolError, TransportError
from commsched.transports.backends.ps.frame import MAGIC, VERSION, FrameKind

from ....net.relay import Relay
from ...worlds import a_shard
from .test_transport import MANIFEST, Ended, Failures, connect, make_task

#: What the worker pushes, and so what the average is too.
VALUE = 3.14
BYTES = struct.pack("<f", VALUE)


class OneBit:
    """Changes one bit, in the byte ``at`` behind the beginning of the first ``found`` on the way ``to``."""

    def __init__(self, to: str, found: bytes, at: int) -> None:
        self._to, self._found, self._at = to, found, at

    def __call__(self, to: str, data: bytes) -> bytes:
        place = data.find(self._found) if to == self._to else -1
        if 0 <= place < len(data) - self._at:
            changed = bytearray(data)
            changed[place + self._at] ^= 1
            self._found = b"nothing more"
            return bytes(changed)
        return data


def one_push(lane: str, to: str, found: bytes, at: int):
    return relayed_push(lane, OneBit(to, found, at))


@contextmanager
def relayed_push(lane: str, change: Callable[[str, bytes], bytes]):
    """A worker's push in step 7 over a relay: what the server's first failure is, and the worker's; and the task's data."""
    failures = Failures(), Failures()
    shard = a_shard(None, failures[0], lane=lane)
    with closing(Relay(shard.address, change)) as relay:
        transport = connect(relay.address, lane, failures[1])
        transport.add_group(0, MANIFEST)
        task, ended = make_task(step=7, value=VALUE), Ended()
        transport.start(task, ended)
        yield shard, relay, *failures, task, ended
        transport.close(graceful=False)
        shard.close()


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_push_that_changes_on_the_way_is_averaged_by_nobody(lane):
    with one_push(lane, "server", BYTES, 2) as (shard, _, servers, workers, _, ended):
        for failures in (servers, workers):
            assert type(failures.first()) is TransportError
            assert re.fullmatch(
                rf"partition 0 of step 7, tensor 'weight', which rank 0 \(.*127\.0\.0\.1:\d+\) pushed, arrived damaged at the "
                rf"server at {shard.address}: the checksum of its 256 bytes is [0-9a-f]{{16}}, not [0-9a-f]{{16}} as when they "
                r"were sent; a network card, switch or memory changes bits",
                str(failures.first()),
            )
        assert not ended.done.is_set()


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_an_average_that_changes_on_the_way_is_used_by_nobody(lane):
    with one_push(lane, "worker", BYTES, 1) as (_, relay, _, workers, _, ended):
        assert type(workers.first()) is TransportError
        assert str(workers.first()).startswith(
            f"the average of partition 0 of step 7, tensor 'weight', from server 0 at {relay.address} arrived damaged at "
            "rank 0: the checksum of its 256 bytes is "
        )
        assert not ended.done.is_set()


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_a_header_that_changes_on_the_way_is_believed_by_nobody(lane):
    """The step, of which any number may come; a push for another step would be the next step's."""
    with one_push(lane, "server", MAGIC + bytes([VERSION, FrameKind.PUSH]), 24) as (shard, _, servers, workers, _, ended):
        for failures in (servers, workers):
            assert type(failures.first()) is ProtocolError
            assert str(failures.first()).startswith(f"the server at {shard.address} got from rank 0 (")
            assert "a header that arrived damaged: its checksum is " in str(failures.first())
        assert not ended.done.is_set()


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_tensors_that_change_on_the_way_are_refused(lane):
    with one_push(lane, "server", b'"weight"', 1) as (shard, _, servers, _, _, _):
        assert re.match(
            rf"a GROUP message of rank 0 \(.*\) arrived damaged at the server at {shard.address}: ", str(servers.first())
        )


@pytest.mark.parametrize("lane", ["tcp", "grpc"])
def test_what_is_not_changed_arrives_over_the_relay(lane):
    with one_push(lane, "server", b"not there", 0) as (_, _, servers, workers, task, ended):
        assert ended.done.wait(60)
        assert set(np.frombuffer(task.data, np.float32)) == {np.float32(VALUE)}
        assert servers.none()
        assert workers.none()


def test_a_push_that_comes_twice_is_averaged_once():
    """Somebody on the way replays it, within a connection without TLS. Its checksums are right."""
    first = MAGIC + bytes([VERSION, FrameKind.PUSH])

    def replay(to: str, data: bytes) -> bytes:
        return data + data[data.find(first) :] if to == "server" and first in data else data

    with relayed_push("tcp", replay) as (shard, _, servers, workers, task, _):
        for failures in (servers, workers):
            assert type(failures.first()) is ProtocolError
            assert re.fullmatch(
                rf"the server at {shard.address} got from rank 0 \(127\.0\.0\.1:\d+\): rank 0 pushed partition 0 of step 7, "
                r"tensor 'weight', twice",
                str(failures.first()),
            )
        assert set(np.frombuffer(task.data, np.float32)) == {np.float32(VALUE)}
