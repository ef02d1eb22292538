"""Two machines with two network cards each: network namespaces with two links between them; needs root."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.cluster import Cluster, ClusterUnavailable
from commsched.core.ports import free_port
from tests.transports.rank_processes import ends_of

NBYTES = 8_000_000
FIRST, SECOND = ("10.213.0.1", "10.213.0.2"), ("10.213.1.1", "10.213.1.2")

TRAIN = f"""
import numpy as np
import commsched
from commsched.core.manifest import TensorSpec

with commsched.init(partition="100KB", credit="1MB") as session:
    own = np.full({NBYTES // 4}, session.rank, np.float32)
    session.average(TensorSpec("own", own.shape, "float32"), memoryview(own).cast("B"))
    assert (own == 0.5).all()
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """The namespaces of two machines, with a link between their first cards and one between their second."""
    try:
        with Cluster(["one", "two"], None) as cluster:
            one, two = cluster.namespace("one"), cluster.namespace("two")
            for card, addresses in enumerate((FIRST, SECOND)):
                name = f"card{{}}{card}"
                ends = name.format("a"), name.format("b")
                _ip("link", "add", ends[0], "netns", one, "type", "veth", "peer", "name", ends[1], "netns", two)
                for namespace, end, address in zip((one, two), ends, addresses, strict=True):
                    _ip("-n", namespace, "address", "add", f"{address}/24", "dev", end)
                    _ip("-n", namespace, "link", "set", end, "up")
            yield one, two
    except ClusterUnavailable as error:
        pytest.skip(str(error))


def test_both_cards_carry_partitions(machines: tuple[str, str], tmp_path: Path) -> None:
    before = _sent(machines[1])
    assert _train(machines, tmp_path, COMMSCHED_FLOWS="2") == [(0, ""), (0, "")]
    sent = [after - earlier for after, earlier in zip(_sent(machines[1]), before, strict=True)]
    assert sum(sent) >= NBYTES  # pushes of one half, averages of the other
    assert min(sent) >= NBYTES / 40  # a partition takes the connection that is free, so a slow one carries fewer


def test_flows_that_leave_a_card_without_a_connection_are_refused(machines: tuple[str, str], tmp_path: Path) -> None:
    for code, said in _train(machines, tmp_path):
        assert code == 1
        assert "has 2 addresses, and flows=1 would leave some without a connection: set COMMSCHED_FLOWS=2 on every rank" in said


def _train(machines: tuple[str, str], directory: Path, **settings: str) -> list[tuple[int, str]]:
    """The exit code and stderr of each rank."""
    script = directory / "train.py"
    script.write_text(TRAIN)
    common = {
        "COMMSCHED_CONTROL": f"{FIRST[0]}:{free_port()}",
        "COMMSCHED_TOKEN": secrets.token_hex(32),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PYTHONPATH": str(Path(__file__).parents[4]),
        **settings,
    }
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", machine, sys.executable, str(script)],
            env={**common, "RANK": str(rank), "COMMSCHED_HOST": f"{FIRST[rank]}+{SECOND[rank]}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(machines)
    ]
    return ends_of(ranks)


def _sent(machine: str) -> list[int]:
    """The bytes that each card of ``machine``, the second one, has sent."""
    names = (f"/sys/class/net/cardb{card}/statistics/tx_bytes" for card in range(2))
    return [int(_run("ip", "netns", "exec", machine, "cat", name)) for name in names]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
