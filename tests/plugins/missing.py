"""A plugin whose library is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.jobs.job import ROOT, clean_environ


def import_without(library: str, directory: Path) -> str:
    """What Python says when it imports the plugin of that name, and ``directory`` has the library's place in the path."""
    (directory / f"{library}.py").write_text(f"raise ModuleNotFoundError('No module named x', name='{library}')")
    done = subprocess.run(
        [sys.executable, "-c", f"import commsched.plugins.{library}"],
        env=clean_environ(PYTHONPATH=os.pathsep.join([str(directory), str(ROOT)])),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    return done.stderr
