"""The end of this process: the launcher must take the right process for the cause, and the output must be helpful."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ..core import timeouts
from ..core.errors import ManifestMismatch, RanksDiverged, TransportError, error_text
from ..core.standard_streams import say_error


def unhandled() -> BaseException | None:
    """The exception that ends this process, if one does. Call it at exit, when the interpreter has printed the exception."""
    error = getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def is_consequence(error: BaseException | None) -> bool:
    """Whether ``error`` is, or was caused by, a :class:`TransportError`: another process has failed first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, TransportError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def let_the_cause_end_first(environ: Mapping[str, str]) -> None:
    """Wait before this process ends as a consequence of another's failure. Call it last, when all other work is done."""
    if (path := environ.get("COMMSCHED_LAUNCHER_FILE")) and environ.get("COMMSCHED_RANK", "").isdecimal():
        tell_launcher(path, "heard", int(environ["COMMSCHED_RANK"]))
    time.sleep(timeouts.CONSEQUENCE_SECONDS)  # there is no notification of another process's end


def tell_launcher(path: str, what: str, rank: int) -> None:
    """Append an event of ``rank`` to the launcher's file. ``what`` is ``joined``, or ``heard`` if the rank ends because of
    another's failure. ``commsched run`` otherwise sees only how processes end."""
    try:
        with open(path, "a") as file:
            file.write(f"{what} {rank}\n")
    except OSError:
        pass  # the launcher's message then says less


def record(error: BaseException, environ: Mapping[str, str]) -> None:
    """Write ``error`` to the file in which torchrun looks for the cause, unless the file exists already
    (``torch.distributed.elastic``'s ``record`` also writes it)."""
    where = environ.get("TORCHELASTIC_ERROR_FILE")
    if not where or Path(where).exists():
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    written = json.dumps({"message": {"message": error_text(error), "extraInfo": extra}})
    # Write the whole record or nothing: torchrun ends with an exception if it finds half a record.
    half = Path(f"{where}.{os.getpid()}")
    with suppress(OSError):  # the launcher then takes the process that ends first for the cause
        try:
            half.write_text(written)
            half.replace(where)
        finally:
            half.unlink(missing_ok=True)


log = logging.getLogger("commsched")

_PACKAGE = str(Path(__file__).parent.parent)


def shorten(rank: int) -> None:
    """Print, from now on, an uncaught exception as one line if a traceback of this rank, ``rank``, shows no more: a
    :class:`TransportError` that is not about this rank, a difference between ranks, which each of them raises, and Ctrl-C.
    ``COMMSCHED_LOG=debug`` keeps the whole traceback. An exception hook that the script has set, or sets later, is left alone.
    Idempotent."""
    previous = sys.excepthook
    if previous is not sys.__excepthook__ and not str(getattr(previous, "__module__", "")).startswith("torch."):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _is_said_in_a_line(error, rank) and not log.isEnabledFor(logging.DEBUG):
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            text = "interrupted" if isinstance(error, KeyboardInterrupt) else error_text(error)
            say_error(f"commsched: rank {rank}: {text}{notes}{_place(trace)}")
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def _is_said_in_a_line(error: BaseException, rank: int) -> bool:
    if isinstance(error, TransportError):
        return error.rank != rank
    return isinstance(error, RanksDiverged | ManifestMismatch | KeyboardInterrupt)


def _place(trace: TracebackType | None) -> str:
    """The place in the user's code: the innermost frame of the script, else the innermost frame outside this package."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    chosen = [frame for frame in frames if frame.filename == script] or frames
    return f" (at {chosen[-1].filename}:{chosen[-1].lineno}; COMMSCHED_LOG=debug shows all)" if chosen else ""
