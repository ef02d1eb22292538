"""Standard streams that are closed, full or broken."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from commsched.core.errors import ConfigError
from commsched.core.standard_streams import flush_all, say_error, say_out, say_result


@pytest.fixture(params=["closed before the start", "closed", "full", "nobody reads it"])
def stream(request: pytest.FixtureRequest) -> Iterator[io.TextIOWrapper | None]:
    if request.param == "closed before the start":
        yield None  # what the interpreter makes of it
        return
    reader, writer = os.pipe()
    os.close(reader)
    descriptor = writer if request.param == "nobody reads it" else os.open("/dev/full", os.O_WRONLY)
    broken = os.fdopen(descriptor, "w")
    if request.param == "closed":
        broken.close()
    yield broken
    if request.param != "nobody reads it":
        os.close(writer)
    try:
        broken.close()
    except OSError:  # what could not be written
        pass


def test_what_cannot_be_said_does_no_harm(stream: io.TextIOWrapper | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    say_error("beware")
    say_out("listening")
    flush_all()


def test_a_result_that_is_lost_is_an_error(stream: io.TextIOWrapper | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants it if the stream is closed, or its reader is gone."""
    monkeypatch.setattr(sys, "stdout", stream)
    is_full = stream is not None and not stream.closed and os.readlink(f"/proc/self/fd/{stream.fileno()}") == "/dev/full"
    with pytest.raises(ConfigError, match="stdout: No space left on device") if is_full else nullcontext():
        say_result("a line")


def test_a_connection_does_not_get_the_descriptor_of_a_stream_that_is_closed() -> None:
    script = (
        "import os, socket; from commsched.core.standard_streams import occupy; occupy(); occupy(); "
        "assert socket.socket().fileno() > 2; "
        "assert [os.readlink(f'/proc/self/fd/{each}') for each in (0, 1, 2)] == ['/dev/null'] * 3; os._exit(7)"
    )
    closed = subprocess.run(["bash", "-c", f'exec "{sys.executable}" -c "{script}" <&- >&- 2>&-'], timeout=300)
    assert closed.returncode == 7
