"""``commsched trace``, of timelines that are made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commsched.cli.main import main
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import Partition
from commsched.core.task import CommTask
from commsched.session.trace import TraceObserver, merge

MANIFEST = Manifest(tuple(TensorSpec(name, (250_000,), "float32") for name in ("conv.weight", "fc.weight")))


#: Partition, tensor, and the seconds of a step at which it is ready, started, sent and done.
TASKS = ((2, 1, 0.0, 0.0, 0.02, 0.03), (0, 0, 0.01, 0.01, 0.04, 0.06), (1, 0, 0.01, 0.01, 0.05, 0.07))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Three steps of 100 ms: fc's average is there before its forward, and conv's is waited for. conv has two partitions."""
    for rank in range(2):
        observer = TraceObserver(tmp_path, rank)
        observer.add_group(0, MANIFEST)
        for step in range(3):
            begin = 10.0 + 0.1 * step
            observer.on_step(0, step, begin)
            for index, tensor, *at in TASKS:
                task = CommTask(0, step, Partition(index, "float32", 0, 500_000 * (1 + tensor), (tensor,)), None)
                task.ready_at, task.started_at, task.sent_at, task.done_at = (begin + seconds for seconds in at)
                observer.on_task(task)
            observer.on_span("wait", "conv.weight", begin + 0.05, begin + 0.07)
            observer.on_span("forward", "conv", begin + 0.05, begin + 0.08)
            observer.on_span("forward", "fc", begin + 0.08, begin + 0.1)
        observer.close()
    merge(tmp_path)
    return tmp_path


def test_each_layer_has_its_times_and_what_was_waited_for_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0 (the file has 2), steps 0 to 2: 100.0 ms each, of which the engine waits 20.0 ms"
    assert [line.split() for line in lines[3:6]] == [
        ["layer", "size", "parts", "ready", "sent", "done", "needed"],
        ["conv.weight", "1.0", "MB", "2", "10.0", "50.0", "70.0", "50.0", "waited", "for"],
        ["fc.weight", "1.0", "MB", "1", "0.0", "20.0", "30.0", "80.0"],
    ]
    assert lines[-1] == "Waited for, in ms of a step: conv.weight 20.00"


def test_a_layer_is_one_row_although_its_last_piece_has_a_bias_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = TraceObserver(tmp_path, 0)
    observer.add_group(0, Manifest((TensorSpec("fc.weight", (1000,), "float32"), TensorSpec("fc.bias", (10,), "float32"))))
    for step in range(3):
        observer.on_step(0, step, 10.0 + 0.1 * step)
        for index, *of in ((1, 2000, 4040, (0, 1)), (0, 0, 2000, (0,))):
            task = CommTask(0, step, Partition(index, "float32", *of), None)
            task.ready_at = task.started_at = 10.01 + 0.1 * step
            task.sent_at, task.done_at = (task.ready_at + seconds for seconds in (0.02, 0.03 + 0.02 * index))
            observer.on_task(task)
    observer.close()
    merge(tmp_path)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    [layer] = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["name"], layer["bytes"], layer["partitions"]) == ("fc.weight and 1 more", 4040, 2)
    assert layer["done_ms"] == pytest.approx(60.0)


def test_a_partition_of_two_tasks_has_its_bytes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reduce-scatter and an all-gather, say."""
    observer = TraceObserver(tmp_path, 0)
    observer.add_group(0, MANIFEST)
    for step in range(3):
        begin = 10.0 + 0.1 * step
        observer.on_step(0, step, begin)
        for collective, at in (("reduce_scatter", 0.01), ("all_gather", 0.03)):
            task = CommTask(0, step, Partition(0, "float32", 0, 500_000, (0,)), None, collective)
            task.ready_at, task.started_at, task.sent_at, task.done_at = (begin + at + more for more in (0.0, 0.0, 0.01, 0.02))
            observer.on_task(task)
    observer.close()
    merge(tmp_path)
    assert main(["trace", str(tmp_path), "--json"]) == 0
    [layer] = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["bytes"], layer["partitions"]) == (500_000, 1)
    assert [layer[f"{what}_ms"] for what in ("ready", "done")] == pytest.approx([10.0, 50.0])


def test_the_waits_of_a_step_are_those_of_its_time_whatever_group_they_belong_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The group of the fewer steps has more tensors, so a wait belongs to one of its steps."""
    observer = TraceObserver(tmp_path, 0)
    observer.add_group(0, MANIFEST)
    observer.add_group(1, Manifest((TensorSpec("critic", (250_000,), "float32"),)))
    for step in range(12):
        begin = 10.0 + 0.1 * step
        observer.on_step(1, step, begin)
        if step % 3 == 0:
            observer.on_step(0, step // 3, begin + 0.05)
        observer.on_span("wait", "critic", begin + 0.06, begin + 0.08)
    observer.close()
    merge(tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    assert "100.0 ms each, of which the engine waits 20.0 ms" in capsys.readouterr().out


def test_a_rank_may_be_chosen_and_json_has_the_same(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(directory / "trace.json"), "--rank", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank"], found["step_ms"]) == (1, pytest.approx(100.0))
    assert found["layers"][0]["done_ms"] == pytest.approx(70.0)
    assert found["waits"] == [{"name": "conv.weight", "ms": pytest.approx(20.0)}]


BAR = {"ph": "X", "pid": 0, "tid": 1, "name": "x", "ts": 1.0, "dur": 1.0}

#: Bars as other programs write them, and as a later version of this one might.
FOREIGN = {
    "without a kind": BAR | {"args": {}},
    "torch's operator": BAR | {"cat": "cpu_op", "args": {"External id": 1}, "pid": "Spans"},
    "Chrome's, without arguments": BAR | {"cat": "toplevel"},
    "a step of something else": BAR | {"cat": "step", "args": {}},
    "times as text": BAR | {"cat": "wait", "args": {"step": 1}, "dur": "1"},
    "a task without a size": BAR | {"cat": "queue", "args": {"group": 0, "step": 0, "partition": 0}},
    "a task of no tensors": BAR | {"cat": "queue", "args": {"group": 0, "step": 0, "partition": 0, "bytes": 1, "tensors": []}},
}


@pytest.mark.parametrize("bar", FOREIGN)
@pytest.mark.parametrize("is_list", [False, True])
def test_a_timeline_of_another_program_is_refused(
    directory: Path, capsys: pytest.CaptureFixture[str], bar: str, is_list: bool
) -> None:
    ours = json.loads((directory / "trace.json").read_text())["traceEvents"]
    events = [*ours, FOREIGN[bar]]
    (directory / "x.json").write_text(json.dumps(events if is_list else {"traceEvents": events}))
    assert main(["trace", str(directory / "x.json")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"commsched: ConfigError: {directory / 'x.json'} is no timeline of commsched: ")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"traceEvents": [{"ph": "X", "args": {}}]}', "\xff"])
def test_what_is_no_timeline_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (tmp_path / "x.json").write_text(content, "latin-1")
    assert main(["trace", str(tmp_path / "x.json")]) == 2
    assert "is no timeline of commsched" in capsys.readouterr().err


def test_a_timeline_of_another_program_with_nothing_that_we_know_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torch's profiler writes them: with arguments, kinds and times."""
    bar = BAR | {"cat": "cpu_op", "name": "aten::add", "args": {"External id": 1}}
    (tmp_path / "x.json").write_text(json.dumps({"traceEvents": [bar]}))
    assert main(["trace", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.endswith("is no timeline of commsched: another program has written its events\n")


def test_a_rank_that_is_not_there_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(directory), "--rank", "7"]) == 2
    assert "has no steps of rank 7; it has ranks 0, 1" in capsys.readouterr().err
