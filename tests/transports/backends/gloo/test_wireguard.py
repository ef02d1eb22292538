"""The recipe for WireGuard of ``docs/security.md``, on two machines made of network namespaces; needs root and ``wg``."""

from __future__ import annotations

import re
import secrets
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.harness.cluster import Cluster, ClusterUnavailable
from commsched.core.ports import free_port
from tests.code_blocks import ROOT, all_blocks
from tests.transports.rank_processes import ends_of

VALUES = 3.25, 5.5

TRAIN = f"""
import numpy as np
import commsched
from commsched.core.manifest import TensorSpec

with commsched.init(transport="gloo") as session:
    own = np.full(500_000, {VALUES}[session.rank], np.float32)
    session.average(TensorSpec("own", own.shape, "float32"), memoryview(own).cast("B"))
    assert (own == {sum(VALUES) / 2}).all()
"""

LISTEN = """
import socket, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packets.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: what does not fit is lost
packets.bind((sys.argv[1], 0))
with open(sys.argv[2], "wb", buffering=0) as heard:
    print("listening", flush=True)
    while True:
        heard.write(packets.recv(1 << 16))
"""

KERNELS = "ip link add wg0 type wireguard"
#: The same in a process, for kernels without WireGuard. Its socket's directory would be the same for both machines.
PROCESS = "mkdir -p /run/wireguard; mount -t tmpfs tmpfs /run/wireguard; wireguard-go wg0"


class Machine:
    def __init__(self, cluster: Cluster, name: str, directory: Path) -> None:
        self.address = cluster.address(name)
        self.directory = directory / name
        self.directory.mkdir()
        self._within = ["ip", "netns", "exec", cluster.namespace(name)]
        [self.card] = re.findall(r"^\d+: (\w+)@", self.run("ip", "-o", "link", "show", "type", "veth"), re.MULTILINE)

    def start(self, *command: str, **environ: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        environ = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), **environ}
        return subprocess.Popen([*self._within, *command], cwd=self.directory, env=environ, stdout=pipe, stderr=pipe, text=True)

    def code(self, *command: str) -> int:
        with self.start(*command) as process:
            return process.wait(60)

    def run(self, *command: str, **environ: str) -> str:
        process = self.start(*command, **environ)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return out


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Two machines that have done what the page says."""
    if shutil.which("wg") is None:
        pytest.skip("there is no wg: install the package wireguard-tools")
    [block] = [block.text for block in all_blocks("sh") if block.page == "security.md" and "wg genkey" in block.text]
    keys, _, rest = block.partition("\n")
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(["one", "two"], None))
        except ClusterUnavailable as error:
            pytest.skip(str(error))
        pair = [Machine(cluster, name, tmp_path_factory.mktemp("machines")) for name in ("one", "two")]
        if pair[0].code(*KERNELS.replace("wg0", "wgtry").split()) != 0:
            if shutil.which("wireguard-go") is None:
                pytest.skip("the kernel has no WireGuard: install the package wireguard-go")
            assert KERNELS in rest
            rest = rest.replace(KERNELS, PROCESS)
        public = [machine.run("sh", "-c", keys).strip() for machine in pair]
        for number, machine in enumerate(pair):
            lines = rest if number == 0 else _swapped(rest)
            environ = {"THEIR_KEY": public[1 - number], "THEIR_ADDRESS": pair[1 - number].address}
            machine.run("unshare", "--mount", "sh", "-ec", lines, **environ)
            stack.callback(machine.run, "ip", "link", "del", "wg0")  # with it the process ends
        yield pair


def _swapped(lines: str) -> str:
    """The lines of the other machine."""
    own, other = "10.99.0.1/24", "10.99.0.2/32"
    assert own in lines
    assert other in lines
    return lines.replace(other, "10.99.0.1/32").replace(own, "10.99.0.2/24")


@pytest.mark.parametrize("is_secret", [True, False])
def test_who_listens_between_the_machines_sees_gradients_only_without_it(machines: Sequence[Machine], is_secret: bool) -> None:
    file = machines[0].directory / f"heard-{is_secret}"
    listener = machines[0].start(sys.executable, "-c", LISTEN, machines[0].card, str(file))
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        assert _train(machines, "10.99.0.1" if is_secret else machines[0].address) == [(0, ""), (0, "")]
    finally:
        listener.kill()
        listener.communicate()
    heard = file.read_bytes()
    assert len(heard) > 500_000  # half of each rank's values, at least
    assert [struct.pack("<f", value) * 8 in heard for value in VALUES] == [not is_secret] * 2


def _train(machines: Sequence[Machine], address: str) -> list[tuple[int, str]]:
    """The exit code and stderr of each rank."""
    environ = {"COMMSCHED_CONTROL": f"{address}:{free_port()}", "COMMSCHED_TOKEN": secrets.token_hex(32)}
    environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = [machine.start(sys.executable, "-c", TRAIN, RANK=str(rank), **environ) for rank, machine in enumerate(machines)]
    return ends_of(ranks)
