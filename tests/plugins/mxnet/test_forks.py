"""A fork while MXNet trains: it joins its threads then, with Python's lock held, so none of them may want that lock."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from commsched import Session
from commsched.plugins.mxnet import ScheduledTrainer, operation
from commsched.plugins.mxnet.operation import Operation
from commsched.plugins.mxnet.queued_group import BufferPlace, QueuedGroup
from tests.jobs.job import clean_environ

from .training import batches, mlp, on_ranks, share, step

FORKS_WHILE_A_CALLBACK_ENDS = """
import os, time
import mxnet as mx
from commsched.plugins.mxnet.operation import push, wait

def begin(operation):
    operation.complete()
    time.sleep(0.2)  # then this thread wants Python's lock

array = mx.nd.zeros(3)
push(begin, writes=[array])
wait([array])
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print("forked")
"""


def test_what_is_waited_for_is_out_of_python_too() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS_WHILE_A_CALLBACK_ENDS],
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=300,  # importing MXNet takes long on a busy machine
        check=False,
    )
    assert done.stdout == "forked\n", done.stderr


class Unseen(dict[int, None]):
    """So that :func:`~commsched.plugins.mxnet.operation.wait` waits for what is queued, and for nothing else."""

    def __bool__(self) -> bool:
        return False


def test_nothing_is_to_come_when_an_exchange_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what is queued, behind what drain() waits for, when gradients were computed and are not handed over yet."""
    begin, look, require = QueuedGroup._begin, QueuedGroup._look_for_failed, QueuedGroup._require_computed
    queued: list[BufferPlace] = []
    required: list[BufferPlace] = []

    def begin_late(self: QueuedGroup, tensor: int, operation: Operation) -> None:
        time.sleep(0.1)
        begin(self, tensor, operation)

    def look_late(self: QueuedGroup, places: Sequence[BufferPlace], number: int, operation: Operation) -> None:
        time.sleep(0.03)  # drain() has begun
        late = [place for place in places if place.queued == number]
        queued.extend(late)
        look(self, late, number, done)
        operation.complete()

    def require_late(self: QueuedGroup, place: BufferPlace, number: int, operation: Operation) -> None:
        time.sleep(0.02)
        required.append(place)
        require(self, place, number, operation)

    def run(session: Session) -> None:
        net = mlp(session.rank)
        trainer = ScheduledTrainer(net.collect_params(), "sgd", session=session)
        (inputs, labels), *_ = batches(2)
        step(net, trainer, inputs[share(session)], labels[share(session)])
        assert trainer._exchange is not None
        assert trainer._exchange._rounds is not None
        trainer._exchange._rounds.queued.drain()
        drained.wait(60)
        assert len(required) == len(queued) > 0

    done, drained = SimpleNamespace(complete=lambda: None), threading.Barrier(2)
    monkeypatch.setattr(operation, "_running", Unseen())
    monkeypatch.setattr(QueuedGroup, "_begin", begin_late)
    monkeypatch.setattr(QueuedGroup, "_look_for_failed", look_late)
    monkeypatch.setattr(QueuedGroup, "_require_computed", require_late)
    on_ranks(run)
