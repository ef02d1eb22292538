"""What ranks tell each other of their addresses before any reaches another."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import commsched.session.opening
from commsched import CommschedError, ConfigError
from commsched.control.rendezvous import Reached
from commsched.core.world import World
from commsched.session.opening import open_session, processor_kind, steps_between_comparisons
from commsched.settings import Settings
from commsched.testing.world import run_world
from commsched.transports import users_of


def open_two(tmp_path: Path, **set_by_user: object) -> list[object]:
    """Two ranks over real channels, which end at once; what each raised, or None."""

    def rank_main(rank: int) -> object:
        keywords = {"rendezvous": str(tmp_path / "control.json"), "transport": "ps", "join_within": 60.0, **set_by_user}
        settings = Settings.load(keywords, {})
        try:
            with open_session(World(rank, 2, rank, 2, "threads"), settings):
                return None
        except ConfigError as error:
            return str(error)

    return run_world(2, rank_main, timeout_seconds=300)


def test_a_loopback_address_of_a_rank_elsewhere_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = itertools.count()
    monkeypatch.setattr(commsched.session.opening, "reached_at", lambda host: Reached(host, True, f"machine {next(machines)}"))
    first, second = open_two(tmp_path)
    assert first == second
    assert str(first).startswith("rank 0 would be reached at 127.0.0.1, but rank 1 is on another machine")


def test_a_loopback_address_beside_another_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = itertools.count()

    def reached(host: str) -> Reached:
        return Reached(host, host == "127.0.0.1", f"machine {next(machines)}")

    monkeypatch.setattr(commsched.session.opening, "reached_at", reached)
    first, second = open_two(tmp_path, host="10.0.0.7+127.0.0.1", flows=2)
    assert first == second
    assert str(first).startswith("rank 0 would be reached at 127.0.0.1, but rank 1 is on another machine")


def test_a_token_that_strangers_may_guess_is_refused_if_the_rank_listens_where_they_can_reach_it(tmp_path: Path) -> None:
    """The control channel is at loopback, where any token will do, and gradients come at the address of ``host``."""
    for said in open_two(tmp_path, host="10.0.0.7", token="x", join_within=5.0):
        assert str(said).startswith("the token has 1 of at least 16 characters, and host='10.0.0.7' may be reached by other")


def test_addresses_that_no_gradient_takes_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI has connections of its own, and the control channel may go through a tunnel that begins at loopback."""

    def opened(context: object, name: str) -> None:
        raise ConfigError(f"{name} is opened")

    machines = itertools.count()
    monkeypatch.setattr(commsched.session.opening, "reached_at", lambda host: Reached(host, True, f"machine {next(machines)}"))
    monkeypatch.setattr(commsched.session.opening, "transport_name", lambda *about: "mpi")
    monkeypatch.setattr(commsched.session.opening, "open_named", opened)
    assert "mpi is opened" in open_two(tmp_path)  # one rank may hear of the other's


def test_what_fails_when_all_have_joined_ends_the_job_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(address: str, local_rank: int, stats: object) -> Callable[[], None]:
        if local_rank == 1:
            raise ConfigError("no further thread")
        return lambda: None

    def rank_main(rank: int) -> str:
        settings = Settings.load({**keywords, "rendezvous": str(tmp_path / "control.json")}, {})
        with pytest.raises(CommschedError) as raised, open_session(World(rank, 2, rank, 2, "threads"), settings) as its:
            its.gather(None)
        return str(raised.value)

    keywords = {"transport": "ps", "join_within": 60.0, "metrics": "127.0.0.1:0"}
    monkeypatch.setattr(commsched.session.opening, "serve_metrics", serve)
    assert run_world(2, rank_main, timeout_seconds=300) == ["rank 1 ended: ConfigError: no further thread", "no further thread"]
    assert not [each.name for each in threading.enumerate() if each.name.startswith("commsched-")]


def test_a_faster_network_of_all_ranks_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faster = {"10.1.0.0/16": "10.1.0.1 (fast0, 100000 Mb/s)"}
    monkeypatch.setattr(commsched.session.opening, "faster_networks", lambda host: faster)
    with caplog.at_level(logging.WARNING):
        assert open_two(tmp_path) == [None, None]
    [line] = [message for message in caplog.messages if "faster" in message]
    assert line == (
        "gradients travel by 127.0.0.1 (loopback), but every rank has a faster card in 10.1.0.0/16, where rank 0 is at "
        "10.1.0.1 (fast0, 100000 Mb/s): set control to that address, or host on every rank to its own"
    )


def test_a_setting_that_the_transport_does_not_use_is_refused(tmp_path: Path) -> None:
    assert open_two(tmp_path, order="static") == 2 * [
        f"order='static' has no effect with transport=ps: it is for {', '.join(users_of('order'))}"
    ]


def test_a_setting_that_a_chosen_transport_does_not_use_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_two(tmp_path, transport="auto", order="static") == [None, None]
    said = f"order='static' has no effect with transport=ps: it is for {', '.join(users_of('order'))}"
    assert caplog.messages.count(said) == 1


def test_a_collective_that_a_chosen_transport_does_not_have_is_refused(tmp_path: Path) -> None:
    said = f"collective='rsag' has no effect with transport=ps: it is for {', '.join(users_of('collective'))}"
    assert open_two(tmp_path, transport="auto", collective="rsag") == [said, said]


def test_a_timeline_tells_the_settings_that_a_user_gave_as_they_are_written(tmp_path: Path) -> None:
    launched = {"launcher_file": str(tmp_path / "told")}
    given = {"trace": str(tmp_path / "traces"), "trace_steps": "5-8", "rate": "200mbit"}
    assert open_two(tmp_path, **given, **launched) == [None, None]
    about = json.loads((tmp_path / "traces" / "trace.rank0.json").read_text())["otherData"]
    assert about["settings"] == f"join_within=60.0, rate=200mbit, trace={given['trace']!r}, trace_steps=5-8, transport='ps'"


# --- weights are compared bit by bit only where ranks compute alike, or where the user asks for it ---

UNLIKE = (
    "weights are not compared between ranks, since the processors or devices of ranks 0 and 2 are of different kinds and may "
    "round updates differently; check_weights=100 compares them all the same"
)


def test_ranks_that_compute_alike_compare_their_weights(caplog: pytest.LogCaptureFixture) -> None:
    assert [steps_between_comparisons(Settings(), rank, lambda kind: [kind] * 3) for rank in range(3)] == [100] * 3
    assert caplog.messages == []


def test_ranks_on_unlike_processors_do_not_and_rank_0_says_so(caplog: pytest.LogCaptureFixture) -> None:
    steps = [steps_between_comparisons(Settings(), rank, lambda kind: [kind, kind, "another"]) for rank in range(3)]
    assert steps == [0, 0, 0]
    assert caplog.messages == [UNLIKE]


def test_so_do_ranks_on_unlike_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"cpu": "", "cuda:0": "one GPU", "cuda:1": "one GPU", "cuda:2": "another GPU"}
    monkeypatch.setattr(commsched.session.opening, "model_of", models.__getitem__)

    def steps(*devices: str) -> list[int]:
        told: list[Any] = []
        for device in devices:
            steps_between_comparisons(Settings(), 1, lambda kind: told.append(kind) or [kind], device)
        return [steps_between_comparisons(Settings(), 1, lambda kind: told, device) for device in devices]

    assert steps("cuda:0", "cuda:1") == [100, 100]
    assert steps("cuda:0", "cuda:2") == [0, 0]
    assert steps("cuda:0", "cpu") == [0, 0]


@pytest.mark.parametrize("wanted", [0, 7])
def test_what_the_user_has_set_counts(caplog: pytest.LogCaptureFixture, wanted: int) -> None:
    settings = Settings.load({"check_weights": wanted}, {})
    assert steps_between_comparisons(settings, 0, lambda kind: [kind, "another"]) == wanted
    assert caplog.messages == []


def test_a_kind_is_told_by_what_kernels_are_chosen_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(flags: str, rate: str) -> str:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nvendor_id\t: X\ncpu MHz\t\t: {rate}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
        monkeypatch.setattr(commsched.session.opening, "_CPUINFO", file)
        return processor_kind()

    assert kind("fma avx2", "2000") == kind("fma avx2", "3000")
    assert kind("fma avx2", "2000") != kind("fma avx2 avx512f", "2000")
    monkeypatch.setattr(commsched.session.opening, "_CPUINFO", tmp_path / "none")
    assert isinstance(processor_kind(), str)


def test_so_is_a_kind_of_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(commsched.session.opening, "_CPUINFO", file)
    fields = {"CPU implementer": "0x41", "CPU architecture": "8", "CPU part": "0xd0c", "Features": "fp asimd"}
    texts = [fields, *({**fields, name: f"{value} other"} for name, value in fields.items())]
    kinds = []
    for text in texts:
        file.write_text("".join(f"{name}\t: {value}\n" for name, value in text.items()))
        kinds.append(processor_kind())
    assert len(set(kinds)) == len(texts)
