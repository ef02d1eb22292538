"""The line that every job begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from commsched.core.config import SchedulerConfig, Settings
from commsched.core.manifest import Manifest, TensorSpec
from commsched.first_line import FirstLine, first_line

MANIFEST = Manifest(tuple(TensorSpec(f"layer{i}", (1000, 500), "float32") for i in range(3)))
ONE = Manifest((TensorSpec("weight", (20,), "float64"),))


@pytest.mark.parametrize(
    ("settings", "transport", "ordered", "manifest", "line"),
    [
        ({}, "ps", False, MANIFEST, "ps over tcp, 3 tensors of 6.0 MB per step, partition 4.0 MB, credit 16.0 MB, priority"),
        (
            {"lane": "grpc", "servers": ("a:1",), "wire": "bfloat16"},
            "ps",
            False,
            MANIFEST,
            "ps over grpc with 1 server, 3 tensors of 6.0 MB per step, partition 4.0 MB, credit 16.0 MB, priority, "
            "bfloat16 on the wire",
        ),
        (
            {"order": "static", "policy": "rsag", "partition": 64_000},
            "gloo",
            True,
            ONE,
            "gloo, 1 tensor of 160 bytes per step, partition 64 KB, credit 16.0 MB, rsag, static order",
        ),
    ],
)
def test_it_says_what_decides_on_speed_and_result(
    settings: dict[str, Any], transport: str, ordered: bool, manifest: Manifest, line: str
) -> None:
    given = replace(Settings(), **settings)
    assert first_line(given, transport, ordered, 4, 2, given.scheduler, manifest) == f"4 ranks on 2 hosts, {line}"


def test_the_configuration_is_that_in_use() -> None:
    """Which a tuner may have changed, or may be that of a tuned file."""
    line = first_line(Settings(), "ps", False, 2, 1, SchedulerConfig(partition_bytes=1_500_000, policy="fifo"), ONE)
    assert line.startswith("2 ranks on 1 host, ps over tcp, ")
    assert line.endswith(", partition 1.5 MB, credit 16.0 MB, fifo")


def test_it_is_said_once() -> None:
    said: list[str] = []
    first = FirstLine(said.append, lambda manifest: f"{len(manifest.tensors)} tensors")
    first.on_register(1, MANIFEST)
    first.on_register(2, ONE)
    assert said == ["3 tensors"]
