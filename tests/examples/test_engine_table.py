"""The table of engines and transports says what ran, and the check sees what it says besides."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import engine_table
from .engine_table import BEGIN, END, Cell, main, note, table

CELLS = [Cell("numpy", "ps", "float64", 1e-9), Cell("numpy", "mpi", "float64", 1e-9), Cell("jax", "ps", "float32", 1e-5)]
TABLE = """| engine | `ps` | `mpi` |
| --- | --- | --- |
| jax | float32, 1e-05 |  |
| numpy | float64, 1e-09 | float64, 1e-09 |
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page without a table, beside notes of :data:`CELLS`."""
    path = tmp_path / "plugins.md"
    path.write_text(f"# Engines\n{BEGIN}{END}more\n")
    monkeypatch.setattr(engine_table, "PAGE", path)
    monkeypatch.setattr(engine_table, "NOTES", tmp_path / "notes")
    for cell in CELLS:
        note(cell)
    return path


def test_a_table_of_what_ran() -> None:
    assert table(CELLS) == TABLE


def test_the_page_gets_it(page: Path) -> None:
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert page.read_text() == f"# Engines\n{BEGIN}{TABLE}{END}more\n"
    assert main(["--check"]) == 0


def test_what_ran_and_is_not_there_is_seen(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    note(Cell("jax", "mpi", "float32", 1e-5))
    assert main(["--check"]) == 1
    assert "plugins.md has another table than the tests that ran give" in capsys.readouterr().err


def test_what_is_there_and_did_not_run_is_seen(page: Path, tmp_path: Path) -> None:
    main([])
    (tmp_path / "notes" / "numpy-mpi.json").unlink()
    assert main(["--check"]) == 1


def test_rows_of_engines_that_could_not_be_had_stand(page: Path, tmp_path: Path) -> None:
    main([])
    (tmp_path / "notes" / "jax-ps.json").unlink()
    assert main(["--check"]) == 0


def test_nothing_that_ran_is_no_agreement(page: Path, tmp_path: Path) -> None:
    main([])
    for path in (tmp_path / "notes").iterdir():
        path.unlink()
    assert main(["--check"]) == 1
