"""What is checked, and said, before NCCL connects anything."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from commsched.core import timeouts  # noqa: E402
from commsched.core.errors import CommschedError, ConfigError, PeerLost, TransportError  # noqa: E402
from commsched.testing.world import run_world  # noqa: E402
from commsched.transports.backends.nccl import group, open_transport  # noqa: E402


class Ranks:
    """The contexts of a job of two ranks, with what a transport needs of them to open."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._values: list[Any] = [None, None]

    def context(self, rank: int, host: str = "127.0.0.1") -> Any:
        return SimpleNamespace(
            world=SimpleNamespace(rank=rank, world_size=2),
            settings=SimpleNamespace(join_within=10.0, fail_after=10.0),
            host=host,
            gather=lambda value: self._gather(rank, value),
            on_failure=lambda error: None,
            when_failed=lambda callback: None,
        )

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(60)
        values = list(self._values)
        self._barrier.wait(60)
        return values


def errors_of(call: Any) -> list[str]:
    """The error of each of two ranks that ``call`` with a context each."""
    ranks = Ranks()

    def one(rank: int) -> str:
        try:
            call(ranks.context(rank))
        except CommschedError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_world(2, one, timeout_seconds=300)


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_torch_without_nccl_is_named_on_every_rank() -> None:
    version = torch.__version__
    said = (
        f"ConfigError: transport='nccl' on rank 0: this PyTorch ({version}) is built without NCCL; install one built for CUDA"
    )
    assert errors_of(open_transport) == [said, said]


def test_one_device_for_two_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_describe_device", lambda host: {"name": "cuda:0", "identity": "GPU-1"})
    said = (
        "ConfigError: transport='nccl': ranks 0 and 1 share the device cuda:0; NCCL needs one for each: call "
        "torch.cuda.set_device(local_rank) before commsched.init"
    )
    assert errors_of(group.connect) == [said, said]


def test_what_is_missing_on_one_rank_is_said_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([{"name": "cuda:0", "identity": "GPU-1"}, {"error": "PyTorch sees no CUDA device"}])
    monkeypatch.setattr(group, "_describe_device", lambda host: next(found))
    first, second = errors_of(group.connect)
    assert first == second
    assert first.startswith("ConfigError: transport='nccl' on rank ")
    assert first.endswith(": PyTorch sees no CUDA device")


class SumThatIsWrong:
    """A group whose first sum has only this rank in it."""

    def __init__(self, *arguments: Any) -> None:
        self.store, *_ = arguments  # of rank 0: the server lives as long as somebody holds it
        self.aborted = False
        groups.append(self)

    def all_reduce(self, values: Any) -> None:
        pass

    def launch(self, work: Any) -> Any:
        work()
        return SimpleNamespace(synchronize=lambda: None)

    def error(self) -> str:
        return ""

    def abort(self) -> None:
        self.aborted = True


groups: list[SumThatIsWrong] = []


def test_a_wrong_first_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    groups.clear()
    monkeypatch.setattr(group, "_own_device", lambda context: torch.device("cpu"))
    monkeypatch.setattr(group, "NcclGroup", SumThatIsWrong)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    assert errors_of(group.connect) == [
        f"TransportError: rank {rank}: NCCL's first sum of 2 ones on cpu is 1" for rank in range(2)
    ]
    assert [group.aborted for group in groups] == [True, True]


@pytest.mark.parametrize("abort_helps", [True, False])
def test_a_job_that_fails_while_ranks_connect_ends_the_wait(
    abort_helps: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, exited, aborters = threading.Event(), threading.Event(), []

    class Waits(SumThatIsWrong):
        """For a rank that is dead."""

        def launch(self, work: Any) -> Any:
            listeners[1](PeerLost("rank 1 is gone"))  # the control channel's thread may not wait either
            listeners[0](PeerLost("rank 1 is gone"))
            return SimpleNamespace(synchronize=lambda: ended.wait(60))

        def error(self) -> str:
            return "it was aborted"

        def abort(self) -> None:
            aborters.append(threading.current_thread().name)
            if abort_helps:
                ended.set()

    def leave(code: int) -> None:
        exited.set()
        ended.set()

    listeners: list[Any] = []
    monkeypatch.setattr(group, "_own_device", lambda context: torch.device("cpu"))
    monkeypatch.setattr(group, "open_store", lambda context: None)
    monkeypatch.setattr(group, "NcclGroup", Waits)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(timeouts, "STUCK_LIBRARY_SECONDS", 5.0 if abort_helps else 0.01)
    monkeypatch.setattr("os._exit", leave)
    context = Ranks().context(0)
    context.when_failed = listeners.append
    with pytest.raises(TransportError, match="rank 0: NCCL could not connect cpu: RuntimeError: it was aborted"):
        group.connect(context)
    assert "commsched-nccl-abort" in aborters
    assert exited.is_set() is not abort_helps
    assert ("commsched: PeerLost: rank 1 is gone" in capsys.readouterr().err) is not abort_helps


def test_ranks_meet_in_the_store() -> None:
    ranks, kept = Ranks(), []

    def one(rank: int) -> bytes:
        opened = group.open_store(ranks.context(rank))
        kept.append(opened)
        if rank == 0:
            opened.set("identifier", b"\x00\xffnccl")
        return opened.get("identifier")

    assert run_world(2, one, timeout_seconds=300) == [b"\x00\xffnccl"] * 2


def test_a_store_that_cannot_open_is_told_to_every_rank() -> None:
    ranks = Ranks()

    def one(rank: int) -> str:
        with pytest.raises(TransportError) as raised:
            group.open_store(ranks.context(rank, host="203.0.113.7"))  # an address that no machine has
        return str(raised.value)

    first, second = run_world(2, one, timeout_seconds=300)
    assert first == second
    assert first.startswith("rank 0 could not open a store for process groups on 203.0.113.7: OSError")


def test_torch_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "torch")
    monkeypatch.setattr("commsched.transports.backends.nccl.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'transport=\'nccl\' needs PyTorch: pip install "commsched\[torch\]"'):
        open_transport(Ranks().context(0))
