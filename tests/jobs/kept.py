"""Servers that are started by hand, as a user would, for elastic jobs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .job import clean_environ

TOKEN = "a token of these tests"


@contextmanager
def kept_server(
    bind: str = "127.0.0.1:0", within: Sequence[str] = (), **environ: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``commsched server --keep`` at ``bind``, and the address where it listens. Ends when the block is left."""
    command = [*within, sys.executable, "-m", "commsched", "server", "--keep", "--bind", bind]
    serving = subprocess.Popen(
        command,
        env=clean_environ(**{"COMMSCHED_TOKEN": TOKEN, **environ}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with serving:
        assert serving.stdout is not None
        try:
            yield serving, serving.stdout.readline().split()[-1]
        finally:
            serving.kill()
