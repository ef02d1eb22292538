from __future__ import annotations

from typing import Any

import pytest

from commsched.control.elastic_messages import (
    Ended,
    Finish,
    LauncherHello,
    Listens,
    MemberSaid,
    NotStarted,
    Place,
    RankEnded,
    StartMember,
    Summoned,
    Tell,
    from_line,
    to_line,
)
from commsched.control.generations import Asked, GiveUp

MESSAGES = [
    Asked(),
    Asked(7, True, 2, True, True),
    Asked(keeps_nothing=True),
    Place(2, 0, 3, 0, 2, 1, 9, "10.0.0.1", "generation 2 1f", ("127.0.0.1:7",)),
    Finish(),
    GiveUp("because"),
    Summoned(),
    Listens(3, "[::1]:9"),
    RankEnded(3, "rank 1 (pid 7)", 1),
    LauncherHello({"-n": 4, "--replace-within": 30.0}, 2, "10.0.0.2"),
    MemberSaid(3, to_line(Asked()).decode()),
    Ended(3, -9, ("joined", "heard"), True),
    NotStarted(4),
    StartMember(4, 2, 0),
    Tell(4, to_line(GiveUp("a \n line")).decode()),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_as_a_line(message: Any) -> None:
    line = to_line(message)
    assert line.index(b"\n") == len(line) - 1
    assert from_line(line) == message


LINES = (b"", b"{}", b"[]", b"7\n", b'{"kind": "Place"}\n', b'{"kind": []}', b'{"kind": "Popen"}', b"\xff", b"[" * 100_000)


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line[:20]))
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="this is no message of an elastic job"):
        from_line(line)
