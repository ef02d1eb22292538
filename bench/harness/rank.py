"""One rank of a job that :mod:`bench.harness.job` started: ``python -m bench.harness.rank MODULE DIRECTORY ARGUMENTS``."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import commsched
from commsched import CommschedError


def main() -> int:
    """Run the rank. Returns 0 after writing the result of rank ``r`` to ``rank<r>.json`` in DIRECTORY, or 1 after printing the
    error to stderr."""
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


def end(code: int) -> NoReturn:
    """End this process, a rank, with ``code``."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "mpi4py.MPI" in sys.modules:
        if code:
            sys.exit(code)  # the transport has arranged the end of MPI after a failure
        sys.modules["mpi4py.MPI"].Finalize()
        # MPICH signs off from mpiexec in a handler of C's exit. Without that, mpiexec sees a crash and kills the ranks that are
        # still in Finalize.
        ctypes.PyDLL(None).exit(code)
    # Everything is closed or written. Do not wait for the engines' own exit handlers: gloo's occasionally hangs.
    os._exit(code)


if __name__ == "__main__":
    end(main())
