"""One rank of a job that :mod:`bench.job` started: ``python -m bench.rank MODULE DIRECTORY ARGUMENTS``."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path

import commsched
from commsched.core.errors import CommschedError


def main() -> int:
    """0, and what rank ``r`` returned is in DIRECTORY's ``rank<r>.json``; or 1, and why is on stderr."""
    module, directory, arguments = sys.argv[1:]
    try:
        with commsched.init() as session:
            returned = import_module(module).rank_main(session, json.loads(arguments))
        Path(directory, f"rank{session.rank}.json").write_text(json.dumps(returned))
    except CommschedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if "mpi4py.MPI" in sys.modules:
        if code:
            sys.exit(code)  # how MPI ends after a failure, the transport has arranged
        sys.modules["mpi4py.MPI"].Finalize()
        # MPICH takes leave of mpiexec in a handler of C's exit. Where that is left out, mpiexec sees a crash, and kills the
        # ranks that are still in Finalize.
        ctypes.PyDLL(None).exit(code)
    # Everything is closed or written. What engines do at the interpreter's end is not waited for: gloo's now and then hangs.
    os._exit(code)


if __name__ == "__main__":
    _end(main())
