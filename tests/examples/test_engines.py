"""The digits under every engine that is installed here, over every transport that it has: two ranks get what one process gets
with the joint batch. What ran is noted for the table in ``docs/plugins.md`` (``engine_table.py``)."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from tests import warm
from tests.jobs.job import ROOT, run_job
from tests.transports.backends.mpi.launch import BY_DEFAULT, MPICH, run

from .engine_table import Cell, note

STEPS = 40
#: Of each engine: the dtype, and how far two ranks may be from one process, relative to the largest weight of a tensor.
ENGINES = {
    "numpy": ("float64", 1e-9),
    "torch": ("float64", 1e-9),
    "tensorflow": ("float64", 1e-9),
    "mxnet": ("float64", 1e-9),
    "jax": ("float64", 1e-9),
}
IMPORTS = {"torch": warm.TORCH, "tensorflow": warm.TENSORFLOW, "jax": warm.JAX, "mxnet": warm.MXNET, "numpy": warm.NUMPY}
INSTALLED = [name for name in ENGINES if find_spec(name)]
CELLS = [
    (engine, transport)
    for engine in INSTALLED
    for transport in ("ps", "mpi", "gloo")
    if engine == "torch" or transport != "gloo"
]


def train(engine: str, save: Path, transport: str | None = None) -> dict[str, np.ndarray]:
    """The trained parameters by name; without a transport, of one process."""
    command = [str(ROOT / "examples" / f"digits_{engine}.py"), "--steps", str(STEPS), "--dtype", ENGINES[engine][0]]
    command += ["--save", str(save)]
    imports = (*IMPORTS[engine], "sklearn.datasets")
    if transport == "mpi":
        by_default = {**BY_DEFAULT, "COMMSCHED_TRANSPORT": transport}
        if engine == "numpy":  # its ranks find each other by the process that has started them
            imports = ()
        else:
            del by_default["COMMSCHED_RENDEZVOUS"]
        code, out, err = run(MPICH, 2, *command, imports=imports, **by_default)
    else:
        given = [] if transport is None else ["--transport", transport]
        ranks = "1" if transport is None else "2"
        code, out, err = run_job("-n", ranks, *given, "--", sys.executable, *command, imports=imports)
    assert code == 0, err
    assert f"{1 if transport is None else 2} ranks, {STEPS} steps, test accuracy " in out, out
    with np.load(save, allow_pickle=False) as saved:
        return dict(saved)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """What one process trains, by engine; filled as it is asked for."""
    return {}


@pytest.mark.parametrize(("engine", "transport"), CELLS)
def test_two_ranks_train_what_one_process_trains(
    engine: str, transport: str, alone: dict[str, dict[str, np.ndarray]], tmp_path: Path
) -> None:
    if engine not in alone:
        alone[engine] = train(engine, tmp_path / "alone.npz")
    together = train(engine, tmp_path / "together.npz", transport)
    assert together.keys() == alone[engine].keys()
    assert together
    dtype, tolerance = ENGINES[engine]
    difference = 0.0
    for name, expected in alone[engine].items():
        assert expected.dtype == together[name].dtype == dtype, name
        difference = max(difference, float(np.abs(together[name] - expected).max() / np.abs(expected).max()))
    assert difference <= tolerance
    note(Cell(engine, transport, dtype, tolerance))
