import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.harness import results


def test_json_holds_schema_environment_and_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/__main__.py", "overhead", "--json", "f"])
    path = tmp_path / "results.json"
    results.write(path, [{"size_bytes": 4, "link_share": None}])
    document = json.loads(path.read_text())
    assert set(document) == {"schema", "environment", "rows"}
    assert document["schema"] == 1
    assert document["rows"] == [{"size_bytes": 4, "link_share": None}]
    environment = document["environment"]
    assert environment["command"] == ["python", "-m", "bench", "overhead", "--json", "f"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["versions"]["numpy"]
    assert environment["cores"] >= 1
    assert set(environment) >= {"time", "system", "processor", "memory_bytes", "load_average", "commit"}


def test_the_command_of_an_installed_program_is_its_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/commsched", "bench", "train", "--workers", "2"])
    assert results.environment()["command"] == ["commsched", "bench", "train", "--workers", "2"]


def test_a_row_that_is_no_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    results.write(path, [{"n": 1}])
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        results.write(path, [{"n": float("nan")}])
    assert json.loads(path.read_text())["rows"] == [{"n": 1}]
    assert list(tmp_path.iterdir()) == [path]


def test_neither_a_link_nor_what_is_no_file_is_replaced(tmp_path):
    target, link, pipe = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(target)
    results.write(link, [{"n": 1}])
    assert link.is_symlink()
    assert json.loads(target.read_text())["rows"] == [{"n": 1}]
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        results.write(pipe, [{"n": 2}])
        assert json.loads(read.result(60))["rows"] == [{"n": 2}]
    assert pipe.is_fifo()


def test_outside_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert results.environment()["commit"] is None


def test_files_of_python_that_are_new_count_as_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_ROOT", tmp_path)
    monkeypatch.setattr(results, "INSTALLED", False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "first"], check=True)
    seen = [results.commit()]
    (tmp_path / "grün.py").write_text("")
    (tmp_path / "nowhere.py").symlink_to("no such file")
    for text in ("a = 1", "a = 2"):
        (tmp_path / "system.py").write_text(text)
        (tmp_path / "results.json").write_text(text)
        seen.append(results.commit())
    assert "+" not in seen[0]
    assert all(each.startswith(f"{seen[0]}+") for each in seen[1:])
    assert seen[1] != seen[2]


def test_table_aligns_and_marks_what_is_missing():
    rows = [{"size": 65536, "share": 0.91234}, {"size": 4, "share": None}]
    assert results.table(rows, {"size": "size (B)", "share": "of link"}) == (
        "size (B)  of link\n"
        "   65536   0.9123\n"
        "       4        -"
    )  # fmt: skip


def test_table_of_no_rows_is_its_heading():
    assert results.table([], {"size": "size (B)"}) == "size (B)"
