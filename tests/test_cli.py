"""What the command line makes of its options; jobs that it starts are in ``tests/jobs``."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from commsched import launch, server
from commsched.cli import main
from commsched.transports import transport_names


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMSCHED_TOKEN", "secret")
    monkeypatch.setenv("COMMSCHED_LANE", "tcp")
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")  # which the command line sets, for good


def test_a_server_has_the_lane_given(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[str] = []
    monkeypatch.setattr(server, "serve", lambda address, token, settings: lanes.append(settings.lane) or 0)
    assert main(["server", "--lane", "grpc"]) == 0
    assert main(["server"]) == 0
    assert lanes == ["grpc", "tcp"]


def test_a_lane_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "--lane", "pigeon"]) == 2
    assert capsys.readouterr().err == "commsched: ConfigError: lane='pigeon' is unknown; there are: tcp, grpc\n"


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("--transport", "auto", "COMMSCHED_TRANSPORT"),
        ("--fusion", "1MB", "COMMSCHED_FUSION"),
        ("--lane", "grpc", "COMMSCHED_LANE"),
        ("--order", "static", "COMMSCHED_ORDER"),
        ("--wire", "bfloat16", "COMMSCHED_WIRE"),
        ("--hierarchy", "off", "COMMSCHED_HIERARCHY"),
        ("--policy", "rsag", "COMMSCHED_POLICY"),
    ],
)
def test_every_rank_has_the_settings_given(monkeypatch: pytest.MonkeyPatch, option: str, value: str, name: str) -> None:
    environs: list[dict[str, str]] = []

    def run(ranks: int, servers: int, command: Any, environ: dict[str, str]) -> int:
        environs.append(environ)
        return 0

    monkeypatch.setattr(launch, "run", run)
    assert main(["run", "-n", "2", option, value, "--", sys.executable]) == 0
    assert environs[0][name] == value


def test_a_transport_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "--transport", "pigeon", "--", sys.executable]) == 2
    assert capsys.readouterr().err == (
        f"commsched: ConfigError: transport='pigeon' is unknown; there are: auto, {', '.join(transport_names())}\n"
    )


def test_a_wrong_fusion_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "2", "--fusion", "4XB", "--", sys.executable]) == 2
    assert capsys.readouterr().err == (
        "commsched: ConfigError: fusion='4XB' is not a size; write it like 4MB, 512KiB or 65536\n"
    )
