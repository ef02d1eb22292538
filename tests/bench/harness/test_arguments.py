from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness import arguments
from bench.harness.arguments import TRANSPORT_OPTIONS, add_options, new_directory, new_file, transport_columns


def parse(*argv: str, **defaults: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, **defaults)
    return parser.parse_args(list(argv))


def test_an_option_has_the_default_that_is_given() -> None:
    assert vars(parse(workers=3, megabytes=None)) == {"workers": 3, "megabytes": None}
    assert vars(parse("--workers", "4", "--megabytes", "1.5", workers=3, megabytes=None)) == {"workers": 4, "megabytes": 1.5}


def test_auto_is_for_sizes_that_are_chosen() -> None:
    assert parse("--partition", "auto", partition="auto").partition == "auto"
    assert parse("--partition", "1MB", partition="auto").partition == "1MB"
    with pytest.raises(argparse.ArgumentError, match="'auto' is not a size"):
        parse("--partition", "auto", partition="4MB")
    with pytest.raises(argparse.ArgumentError, match="'4XB' is not a size; write it like 4MB, 512KiB or 65536, or auto"):
        parse("--partition", "4XB", partition="auto")


def test_a_tuple_makes_it_a_list() -> None:
    assert parse(workers=(2, 4)).workers == (2, 4)
    assert parse("--workers", "8,16", workers=(2, 4)).workers == (8, 16)
    with pytest.raises(argparse.ArgumentError, match="'8,8' names one twice"):
        parse("--workers", "8,8", workers=(2, 4))
    with pytest.raises(argparse.ArgumentError, match="'1' is not a number of at least 2"):
        parse("--workers", "8,1", workers=(2, 4))


def test_the_help_says_the_default() -> None:
    parser = argparse.ArgumentParser()
    auto = dict.fromkeys(("partition", "credit", "hierarchy", "transport"), "auto")
    add_options(parser, servers=0, workers=(2, 4), bandwidth=None, lane=None, **auto)
    found = {action.dest: action.help or "" for action in parser._actions}
    assert found["servers"].endswith("(default: 0)")
    assert found["workers"].endswith("(default: 2,4)")
    assert found["bandwidth"].endswith("(default: loopback)")
    for size in ("partition", "credit"):
        assert found[size].endswith("; auto: chosen from measurements (default: auto)")
    assert "measurements" not in found["hierarchy"]
    assert found["transport"].endswith("; auto: the one that a job takes that sets none (default: auto)")
    assert found["lane"].endswith("(default: tcp)")


def test_only_the_parameter_server_has_a_lane() -> None:
    assert transport_columns(parse(**TRANSPORT_OPTIONS)) == TRANSPORT_OPTIONS
    assert transport_columns(parse("--transport", "gloo", **TRANSPORT_OPTIONS))["lane"] is None


def test_results_that_could_not_be_kept_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: Callable[[str], Path], path: Path) -> str:
        with pytest.raises(argparse.ArgumentTypeError) as told:
            kind(str(path))
        return str(told.value)

    there = tmp_path / "there.json"
    there.write_text("{}")
    assert new_file(str(there)) == there
    assert new_directory(str(tmp_path / "new" / "newer")) == tmp_path / "new" / "newer"
    assert new_directory("new") == Path("new")
    assert not (tmp_path / "new").exists()
    assert refused(new_directory, there) == f"'{there}' is no directory"
    assert refused(new_directory, there / "new") == f"'{there}' is no directory"
    monkeypatch.setattr(arguments.os, "access", lambda path, mode: path != tmp_path)
    for kind, path in ((new_file, there), (new_file, tmp_path / "new.json"), (new_directory, tmp_path / "new")):
        assert refused(kind, path) == f"nothing may be written to '{tmp_path}'"
    assert new_file("/dev/stdout") == Path("/dev/stdout")
