"""How ranks meet, and what is checked and said before NCCL averages anything."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from commsched.core import timeouts
from commsched.core.errors import CommschedError, PeerLost, TransportError
from commsched.testing.checked_world import Meeting
from commsched.testing.world import run_world
from commsched.transports.backend import TransportContext
from commsched.transports.backends.nccl import open_transport
from commsched.transports.backends.nccl.group import NcclGroup, connect


def errors_of(prepare: Callable[[int, TransportContext], TransportContext]) -> list[str]:
    """The error of each of two ranks that open a transport, each on a device of its own, with the context that ``prepare``
    makes of theirs."""
    meeting = Meeting(2)

    def one(rank: int) -> str:
        context = replace(meeting.context(rank, lambda error: None), device=f"cuda:{rank}")
        try:
            open_transport(prepare(rank, context)).close()
        except CommschedError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_world(2, one, timeout_seconds=60)


def on_own(rank: int, context: TransportContext) -> TransportContext:
    return context


def test_ranks_meet(cupy: Any) -> None:
    assert errors_of(on_own) == ["", ""]
    assert "commsched-nccl-errors" not in [thread.name for thread in threading.enumerate()]


def test_a_session_that_knows_no_device_takes_the_current_one(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "commsched.transports.backends.nccl.group.NcclGroup.__init__", lambda group, device, *_: seen.append(device.name)
    )
    monkeypatch.setattr("commsched.transports.backends.nccl.group._count_ranks", lambda group: 1)
    monkeypatch.setattr(NcclGroup, "error", lambda group: "")
    with cupy.cuda.Device(2):
        connect(Meeting(1).context(0, pytest.fail))
    assert seen == ["cuda:2"]


def test_without_cupy_every_rank_says_who_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr("commsched.devices.backends.cuda.find_spec", lambda name: None)
    said = (
        "ConfigError: transport='nccl' on rank 0: the device 'cuda:0' needs cupy: pip install \"commsched[cuda]\" for CUDA 12, "
        'or "commsched[cuda13]" for CUDA 13'
    )
    assert errors_of(on_own) == [said, said]


def test_without_nccl_every_rank_says_who_lacks_it(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.nccl, "available", False)
    said = (
        "ConfigError: transport='nccl' on rank 0: cupy finds no NCCL: pip install \"nvidia-nccl-cu12\" for CUDA 12, or "
        '"nvidia-nccl-cu13" for CUDA 13'
    )
    assert errors_of(on_own) == [said, said]


def test_an_identifier_that_cannot_be_made_is_told_to_every_rank(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise cupy.cuda.nccl.NcclError(1)

    monkeypatch.setattr(cupy.cuda.nccl, "get_unique_id", fail)
    said = "ConfigError: transport='nccl' on rank 0: NcclError: NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error"
    assert errors_of(on_own) == [said, said]


def test_one_device_for_two_ranks_is_refused(cupy: Any) -> None:
    said = (
        "ConfigError: transport='nccl': ranks 0 and 1 share the device cuda:0; NCCL needs one for each: keep each rank's model "
        "on the device of its local rank, and call torch.cuda.set_device(local_rank), or commsched.init(device=...), before "
        "anything else opens the session; for JAX, set CUDA_VISIBLE_DEVICES to another one for each rank. Over transport=ps "
        "ranks may share one"
    )
    assert errors_of(lambda rank, context: replace(context, device="cuda:0")) == [said, said]


def test_different_versions_are_refused(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = threading.local()

    def begin(rank: int, context: TransportContext) -> TransportContext:
        versions.mine = 22703 + rank
        return context

    monkeypatch.setattr(cupy.cuda.nccl, "get_version", lambda: versions.mine)
    said = (
        "ConfigError: transport='nccl': NCCL has version 22703 on rank 0 and 22704 on rank 1; install the same on all machines"
    )
    assert errors_of(begin) == [said, said]


def test_a_wrong_first_sum_is_an_error(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclGroup, "all_reduce", lambda group, values, dtype: None)
    assert errors_of(on_own) == [
        f"TransportError: rank {rank}: NCCL could not connect cuda:{rank}: RuntimeError: the first sum of 2 ones is 1"
        for rank in range(2)
    ]


@pytest.mark.parametrize("abort_helps", [True, False])
def test_a_job_that_fails_while_ranks_connect_ends_the_wait(
    abort_helps: bool, cupy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first sum waits for a rank that is dead. If not even an abort ends that, the process ends."""
    ended, exited, aborters = threading.Event(), threading.Event(), []

    def first_sum(group: NcclGroup, values: Any, dtype: str) -> None:
        for listener in reversed(listeners):  # the control channel's thread may not wait either
            listener(PeerLost("rank 1 is gone"))
        assert ended.wait(60)

    def abort(group: NcclGroup) -> None:
        aborters.append(threading.current_thread().name)
        group._broken = "it was aborted"
        group._ended.set()
        if abort_helps:
            ended.set()

    def leave(code: int) -> None:
        exited.set()
        ended.set()

    listeners: list[Any] = []
    monkeypatch.setattr(NcclGroup, "all_reduce", first_sum)
    monkeypatch.setattr(NcclGroup, "abort", abort)
    monkeypatch.setattr(timeouts, "STUCK_LIBRARY_SECONDS", 5.0 if abort_helps else 0.01)
    monkeypatch.setattr("os._exit", leave)
    context = replace(Meeting(1).context(0, pytest.fail), device="cuda:0", when_failed=listeners.append)
    with pytest.raises(TransportError, match="rank 0: NCCL could not connect cuda:0: RuntimeError: it was aborted"):
        connect(context)
    assert "commsched-nccl-abort" in aborters
    assert exited.is_set() is not abort_helps
    assert ("commsched: PeerLost: rank 1 is gone" in capsys.readouterr().err) is not abort_helps


def test_a_library_that_does_not_close_is_left_behind(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may wait for ranks of this host that have ended."""
    waits = threading.Event()
    monkeypatch.setattr("commsched.transports.backends.nccl.group._CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(cupy.cuda.nccl.NcclCommunicator, "destroy", lambda communicator: waits.wait(60))
    assert errors_of(on_own) == ["", ""]
    waits.set()
