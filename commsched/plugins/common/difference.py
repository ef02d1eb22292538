"""The error that names how ranks differ, once they were found to differ. Shared by plugins."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import commsched

from ...core.errors import CommschedError, RanksDiverged

_VERDICT_SECONDS = 30.0


def end_with_difference(session: commsched.Session, what: str, step: int, values: Mapping[str, Any]) -> NoReturn:
    """Report this rank's ``values`` to rank 0 (see ``Session.compare``) and wait for the failure that this causes.

    Call it only if the values are known to differ between ranks: then every rank calls it.

    Raises:
        RanksDiverged: names the first value that differs. If the job failed earlier, that failure is raised instead.
    """
    failures: list[CommschedError] = []
    failed = threading.Event()

    def fail(error: CommschedError) -> None:
        failures.append(error)
        failed.set()

    session.when_failed(fail)
    session.compare(what, step, values)
    if not failed.wait(_VERDICT_SECONDS):
        raise RanksDiverged(
            f"{what} differ between ranks after step {step}: rank {session.rank} has {json.dumps(dict(values))}"
        )
    raise failures[0]
