"""``worker.py`` on an interpreter that starts no thread at its end, as Python 3.12. Its session is open until then."""

from __future__ import annotations

import atexit
import runpy
import threading
from pathlib import Path

from commsched.core import late_thread


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


late_thread.START_EARLY = True
runpy.run_path(str(Path(__file__).with_name("worker.py")), run_name="__main__")
atexit.register(lambda: setattr(threading.Thread, "start", refuse))  # runs first, as it is registered last
