"""Launchers of one elastic job on several machines: network namespaces if this user may make them, else loopback addresses."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from bench.harness.cluster import Cluster, ClusterUnavailable
from commsched.control.rendezvous import is_listening
from commsched.core.ports import free_port

from .job import Job


@dataclass(frozen=True)
class Hosts:
    """The addresses of machines, and a command that runs another on each. ``are_apart``: none has another's address."""

    addresses: Sequence[str]
    within: Sequence[Sequence[str]]
    are_apart: bool


@contextmanager
def open_hosts(count: int) -> Iterator[Hosts]:
    names = [f"host{number}" for number in range(count)]
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(names, None))
        except ClusterUnavailable:
            yield Hosts([f"127.0.0.{number + 1}" for number in range(count)], [[]] * count, False)
        else:
            within = [["ip", "netns", "exec", cluster.namespace(name)] for name in names]
            yield Hosts([cluster.address(name) for name in names], within, True)


class Machines:
    """Starts launchers of one job, each of which runs ``command``. The first machine has the address at which they meet.
    ``imports``: see :class:`Job`."""

    def __init__(self, hosts: Hosts, command: Sequence[str], imports: Sequence[str] | None = None) -> None:
        self.addresses = hosts.addresses
        self.within = hosts.within
        self.are_apart = hosts.are_apart
        self._command = command
        self._imports = imports
        self._environ = {"COMMSCHED_CONTROL": f"{self.addresses[0]}:{free_port()}", "COMMSCHED_TOKEN": secrets.token_hex(32)}
        self._stack = ExitStack()

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def launch(self, machine: int, options: Sequence[str], *strikes: str, **environ: str) -> Job:
        if machine > 0 and not self.are_apart:  # else this one might host the job
            while not is_listening(self._environ["COMMSCHED_CONTROL"]):
                time.sleep(0.02)
        job = Job(
            *(*options, "--", *self._command, *strikes),
            environ={**self._environ, "COMMSCHED_HOST": self.addresses[machine], **environ},
            within=self.within[machine],
            imports=self._imports,
        )
        return self._stack.enter_context(job)


def ends(*jobs: Job) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each, once all have ended."""
    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(Job.end, jobs))
