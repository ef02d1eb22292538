"""The parameter servers of an elastic job that its user has started, by ``commsched server --keep``. The launcher reserves
those that answer for each generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from ...control.rendezvous import is_loopback, own_host, require_strong
from ...core.errors import TransportError
from ...settings import Settings, each_of
from ...transports.backends.ps.reserve import reserve
from ...transports.backends.ps.stream import StreamOptions
from ..launch import Interrupted, tell_user

_PAUSE_SECONDS = 0.5


class KeptServers:
    """The servers that ``settings`` name, and what is known of them.

    Attributes:
        host: the address at which they reach this machine.

    Raises:
        ConfigError: this machine has no way to a server, the token is too short, or a certificate is missing.
    """

    def __init__(self, settings: Settings, token: str) -> None:
        self.addresses: Sequence[str] = settings.servers
        hosts = [own_host(settings, each_of(address)[0]) for address in self.addresses]
        self.host = next((host for host in hosts if not is_loopback(host)), hosts[0])
        require_strong(token, f"{self.host}:0")
        self._options = StreamOptions.of(replace(settings, rate=None), token)
        self._answer_seconds = settings.fail_after
        self._join_within_seconds = settings.join_within
        self._left_out: set[str] = set()

    def reserve(self, job: str, is_interrupted: Callable[[], bool], when_ended: Callable[[str], object]) -> list[str]:
        """Reserve the servers that answer for ``job``, and return their addresses. If none does, wait for one.

        Args:
            when_ended: called from a thread with the address of one of them that has ended, or has ended that job.

        Raises:
            TransportError: none has answered in time; says why.
            Interrupted: ``is_interrupted``.
        """
        deadline = time.monotonic() + self._join_within_seconds
        has_waited = False
        while True:
            with ThreadPoolExecutor(len(self.addresses)) as threads:
                asked = [
                    threads.submit(reserve, each, self._options, job, self._answer_seconds, partial(when_ended, each))
                    for each in self.addresses
                ]
                problems = {each: answer.result() for each, answer in zip(self.addresses, asked, strict=True)}
            if is_interrupted():
                raise Interrupted
            found = [each for each, problem in problems.items() if not problem]
            if found:
                self._tell(problems)
                return found
            why = "; ".join(f"{each}: {problem}" for each, problem in problems.items())
            if time.monotonic() > deadline:
                raise TransportError(f"none of its servers was free within {self._join_within_seconds:g} s: {why}")
            if not has_waited:
                tell_user(f"the job waits for a server: {why}")
            has_waited = True
            time.sleep(_PAUSE_SECONDS)

    def _tell(self, problems: dict[str, str]) -> None:
        """Tell the user which servers are left out now, and which are no more."""
        left_out = {each for each, problem in problems.items() if problem}
        for each in sorted(left_out - self._left_out):
            tell_user(f"the server at {each} is left out: {problems[each]}")
        for each in sorted(self._left_out - left_out):
            tell_user(f"the server at {each} takes part now")
        self._left_out = left_out
