"""``python -m tests.clusters.slurm``: ``examples/slurm/train.sbatch`` on a Slurm of two nodes that is made for the test.

It needs root and Debian's packages ``slurmctld slurmd slurm-client munge``. Daemons and jobs run in namespaces of their own
(mounts, network, processes) and in a temporary directory: they end with the test, and nothing of the machine's own Slurm is
touched. Both nodes are this machine (EMULATED), with an address each.

The job is interrupted by ``--signal``, is requeued, and ends with the weights of a run without interruption. In another job a
rank is killed, and the others name it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "ip", "unshare")
NODES = {"commsched0": "10.97.0.1", "commsched1": "10.97.0.2"}
STEPS = 200
ON_THE_WAY = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SIGNALING")

CONFIGURATION = """
ClusterName=commsched
SlurmctldHost=commsched0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_res
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmctldTimeout=300
SlurmdTimeout=300
KillWait=10
SchedulerParameters=requeue_setup_env_fail
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def main() -> int:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        needed = ", ".join(missing) or "nothing else"
        print(f"not run: it needs root and {needed}; apt-get install slurmctld slurmd slurm-client munge")
        return 2
    if sys.argv[1:] != ["--within"]:
        namespaces = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return subprocess.run([*namespaces, sys.executable, "-m", "tests.clusters.slurm", "--within"], cwd=ROOT).returncode
    with tempfile.TemporaryDirectory(prefix="commsched-slurm-") as name, cluster(Path(name)) as directory:
        interrupted_and_requeued(directory)
        killed_rank_is_named(directory)
    print("passed")
    return 0


@contextmanager
def cluster(directory: Path) -> Iterator[Path]:
    """Slurm on two nodes, whose names and addresses exist in this process's namespaces only."""
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "nodes", "type", "veth", "peer", "name", "nobody")
    for address in NODES.values():
        call("ip", "address", "add", f"{address}/24", "dev", "nodes")
    for link in ("nodes", "nobody"):
        call("ip", "link", "set", link, "up")
    socket.sethostname("commsched0")  # slurmctld starts on this host only
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NODES.items()))
    call("mount", "--bind", str(hosts), "/etc/hosts")

    nodes = ""
    for number, (name, address) in enumerate(NODES.items()):
        nodes += f"NodeName={name} NodeHostname={name} NodeAddr={address} Port={6820 + number} CPUs=2 State=UNKNOWN\n"
    configuration = directory / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(directory=directory, controller=NODES["commsched0"]) + nodes)
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
    os.environ["SLURM_CONF"] = str(configuration)
    key = directory / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    directory.chmod(0o755)

    with ExitStack() as stack:
        munge = [f"--socket={directory}/munge.socket", f"--key-file={key}", f"--pid-file={directory}/munged.pid"]
        munge += [f"--log-file={directory}/munged.log", f"--seed-file={directory}/munged.seed", "--foreground", "--force"]
        daemons = {"munged": ["munged", *munge], "slurmctld": ["slurmctld", "-D"]}
        daemons |= {name: ["slurmd", "-D", "-N", name] for name in NODES}
        for name, command in daemons.items():
            if name in NODES:
                (directory / name).mkdir()
            with open(directory / f"{name}.out", "w") as out:
                daemon = subprocess.Popen(command, stdout=out, stderr=out)
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
            if name == "munged":
                until(lambda: (directory / "munge.socket").exists(), 10, lambda: logs(directory))
        until(lambda: "idle 2" in call("sinfo", "-h", "-o", "%T %D", check=False), 60, lambda: logs(directory))
        yield directory


def interrupted_and_requeued(directory: Path) -> None:
    checkpoint = directory / "interrupted.pt"
    # Slurm looks at time limits now and then only, so it may signal up to a minute early: here 30 to 90 s after the start. A
    # job that was requeued waits for two minutes.
    job, out = submit(directory, checkpoint, "--time=10", "--signal=TERM@510", "--pause=0.6")
    until(lambda: out.exists() and "interrupted after" in out.read_text(), 200, lambda: logs(directory))
    call("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # the next run shall come to its end
    state(job, "COMPLETED", directory, 600)
    said = out.read_text()
    print(said)
    begins = [int(step) for step in re.findall(r"2 ranks begin at step (\d+)", said)]
    stops = [int(step) for step in re.findall(r"interrupted after step (\d+)", said)]
    require(len(stops) >= 1 and begins == [0, *stops], f"it was not interrupted and continued: {begins}, {stops}", said)
    require(not list(directory.glob("*.token")), "the token is still there", said)

    job, out = submit(directory, directory / "whole.pt", "--time=10", "--pause=0")
    state(job, "COMPLETED", directory, 300)
    sums = [re.findall(r"sum of weights (\S+)", text) for text in (said, out.read_text())]
    require(len(sums[0]) == 1 and sums[0] == sums[1], f"the weights differ: {sums}", said)


def killed_rank_is_named(directory: Path) -> None:
    job, out = submit(directory, directory / "killed.pt", "--time=10", "--pause=0.6")
    until(lambda: out.exists() and "begin at step 0" in out.read_text(), 60, lambda: logs(directory))
    time.sleep(2)
    [victim] = [
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if "SLURM_PROCID=1" in environ(pid) and "preemptible.py" in command(pid) and "srun" not in command(pid)
    ]
    os.kill(victim, 9)
    state(job, "FAILED", directory, 60)
    said = out.read_text()
    print(said)
    require(re.search(r"rank 0: PeerLost: rank 1 .*", said) is not None, "nobody names rank 1", said)


def submit(directory: Path, checkpoint: Path, *options: str) -> tuple[str, Path]:
    out = checkpoint.with_suffix(".log")
    pause = [option for option in options if option.startswith("--pause")]
    given = [option for option in options if option not in pause]
    environ = {**os.environ, "PYTHON": sys.executable, "CHECKPOINT": str(checkpoint), "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        ["sbatch", "--parsable", "--ntasks-per-node=1", f"--output={out}", *given, str(SCRIPT), f"--steps={STEPS}", *pause],
        env=environ,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return said.strip(), out


def state(job: str, wanted: str, directory: Path, within_seconds: float) -> None:
    """Wait until the job is in this state."""
    found = ""

    def reached() -> bool:
        nonlocal found
        found = "".join(re.findall(r"JobState=(\S+)", call("scontrol", "show", "job", job)))
        require(
            found == wanted or found in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SIGNALING"),
            f"the job is {found}",
            logs(directory),
        )
        return found == wanted

    until(reached, within_seconds, lambda: f"the job is {found}\n{logs(directory)}")


def environ(pid: int) -> list[str]:
    return read(f"/proc/{pid}/environ").split("\0")


def command(pid: int) -> str:
    return read(f"/proc/{pid}/cmdline")


def read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def until(condition: Callable[[], bool], within_seconds: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        require(time.monotonic() < deadline, f"not within {within_seconds:g} s", explain())
        time.sleep(0.2)  # other programs' state: nothing could tell us


def require(holds: bool, what: str, evidence: str) -> None:
    if not holds:
        print(evidence)
        raise SystemExit(f"FAILED: {what}")


def logs(directory: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(directory.glob("*.[lo][ou][gt]")))


def call(*words: str, check: bool = True) -> str:
    errors = None if check else subprocess.DEVNULL
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=errors, text=True, check=check).stdout


if __name__ == "__main__":
    sys.exit(main())
