import itertools
import json
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commsched.core.core import Core
from commsched.core.interfaces import Completion
from commsched.core.manifest import Manifest, TensorSpec
from commsched.core.plan import Partition, cut
from commsched.core.scheduler import SchedulerConfig
from commsched.core.task import CommTask
from commsched.session.trace import TraceObserver, merge
from tests.recording_transport import RecordingTransport

Event = dict[str, Any]

MANIFEST = Manifest(tuple(TensorSpec(name, (5,), "float32") for name in ("conv.weight", "conv.bias", "fc.weight")))


def make_task(*times: float, step: int = 3, index: int = 1, tensors: tuple[int, ...] = (2,), group: int = 0) -> CommTask:
    task = CommTask(group, step, Partition(index, "float32", 40, 60, tensors), None)
    task.ready_at, task.started_at, task.sent_at, task.done_at = times
    return task


def read(path: Path) -> list[Event]:
    """The events of a file, after checking what every viewer asks for."""
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["displayTimeUnit"] == "ms"
    events: list[Event] = document["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "C":
            assert event["args"].keys() == {"bytes"}
        elif event["ph"] in "stf":
            assert isinstance(event["id"], str)
        elif event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            assert len(event["args"]) == 1
        else:
            assert event["ph"] == "X"
            assert isinstance(event["cat"], str)
            assert event["dur"] >= 0
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in bars(events)} == named
    return events


def bars(events: list[Event]) -> list[Event]:
    return [event for event in events if event["ph"] == "X"]


def require_no_overlap(events: list[Event]) -> None:
    """On each track time runs forward, and no bar begins before the one before it has ended."""
    tracks = defaultdict(list)
    for event in bars(events):
        tracks[event["pid"], event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    for track in tracks.values():
        for (start, duration), (next_start, _) in itertools.pairwise(track):
            assert start + duration <= next_start


def track_names(events: list[Event]) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_task_is_shown_in_the_queue_on_its_way_and_waiting_for_its_reply(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, rank=2)
    observer.add_group(0, MANIFEST)
    observer.on_task(make_task(1.0, 1.5, 1.75, 2.0, tensors=(1, 2)))
    observer.close()
    events = read(tmp_path / "trace.rank2.json")
    args = {
        "step": 3,
        "partition": 1,
        "tensors": ["conv.bias", "fc.weight"],
        "bytes": 20,
        "priority": 1,
        "group": 0,
    }
    shown = {"ph": "X", "pid": 2, "name": "conv.bias and 1 more", "args": args}
    assert bars(events) == [
        {**shown, "tid": 1, "cat": "queue", "ts": 1_000_000.0, "dur": 500_000.0},
        {**shown, "tid": 2, "cat": "send", "ts": 1_500_000.0, "dur": 250_000.0},
        {**shown, "tid": 3, "cat": "reply", "ts": 1_750_000.0, "dur": 250_000.0},
    ]
    assert {"ph": "M", "pid": 2, "tid": 0, "name": "process_name", "args": {"name": "rank 2"}} in events
    assert track_names(events) == ["queue", "send", "reply"]


def test_spans_stand_on_a_track_of_their_kind_above_the_network(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, rank=0)
    observer.on_task(make_task(1.0, 2.0, 3.0, 4.0))
    for number, track in enumerate(("other", "wait", "update", "backward", "forward")):
        observer.on_span(track, f"layer {number}", number, number + 1)
    observer.close()
    events = read(observer.path)
    assert track_names(events) == ["forward", "backward", "update", "wait", "queue", "send", "reply", "other"]
    assert [event["name"] for event in bars(events) if event["cat"] == "forward"] == ["layer 4"]
    order = [event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"]
    assert order == sorted(order)


def test_times_are_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, rank=1, clock_offset_seconds=-2.5)
    observer.on_span("forward", "layer", 10.0, 10.5)
    observer.close()
    (bar,) = bars(read(observer.path))
    assert (bar["ts"], bar["dur"]) == (7_500_000.0, 500_000.0)


times = st.floats(0, 1e-3).map(lambda seconds: 1e6 + seconds)  # a machine that has been up for long


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None, derandomize=True)
@given(st.lists(st.lists(times, min_size=4, max_size=4).map(sorted), max_size=30), st.floats(-1e3, 1e3))
def test_nothing_overlaps_on_a_track(tmp_path: Path, lives: list[list[float]], offset: float) -> None:
    observer = TraceObserver(tmp_path, 0, offset)
    for life in lives:
        observer.on_task(make_task(*life))
        observer.on_span("wait", "layer", life[0], life[3])
    observer.close()
    events = read(observer.path)
    assert len(bars(events)) == 4 * len(lives)
    require_no_overlap(events)


def test_as_few_lanes_as_there_are_bars_at_one_time(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, 0)
    for start in range(4):
        observer.on_span("wait", "a", start, start + 1)  # each begins where the last one ended
        observer.on_span("update", "b", start, start + 2)
    observer.close()
    assert track_names(read(observer.path)) == ["update", "update 2", "wait"]


HOSTILE = [
    "<script>alert(1)</script>",
    "../../etc/passwd",
    '"quoted" \\ back\\slash',
    "new\nline\x00\x1b[31m\u2028",
    "lone surrogate \ud800",
    "☃ snow",
    "x" * 10_000,
    "",
]


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    observer = TraceObserver(directory, 0)
    observer.add_group(0, Manifest(tuple(TensorSpec(name, (1,), "float32") for name in HOSTILE)))
    for tensor, name in enumerate(HOSTILE):
        observer.on_task(make_task(1.0, 2.0, 3.0, 4.0, tensors=(tensor,)))
        observer.on_span(name, name, 1.0, 2.0)
    observer.close()
    merge(directory)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["run", "trace.json", "trace.rank0.json"]
    shown = [event["name"] for event in bars(read(directory / "trace.json")) if event["cat"] == "send"]
    assert sorted(shown) == sorted([*HOSTILE[:4], "lone surrogate ?", "☃ snow", "x" * 199 + "…", ""])


def test_a_partition_of_very_many_tensors_lists_a_few(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, 0)
    observer.add_group(0, Manifest(tuple(TensorSpec(f"t{index}", (1,), "float32") for index in range(100))))
    observer.on_task(make_task(1.0, 2.0, 3.0, 4.0, tensors=tuple(range(100))))
    observer.close()
    bar = bars(read(observer.path))[0]
    assert bar["name"] == "t0 and 99 more"
    assert bar["args"]["tensors"] == [f"t{index}" for index in range(8)] + ["and 92 more"]


def test_a_task_of_a_group_it_was_not_told_of_has_numbers_for_names(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, 0)
    observer.on_task(make_task(1.0, 2.0, 3.0, 4.0, tensors=(7,), group=5))
    observer.close()
    assert bars(read(observer.path))[0]["name"] == "tensor 7"


def test_it_keeps_no_more_than_it_may_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = TraceObserver(tmp_path, 0, most_events=3)
    for number in range(10):
        observer.on_span("forward", f"layer {number}", number, number + 1)
        observer.on_task(make_task(1.0, 2.0, 3.0, 4.0))
    observer.close()
    assert warnings(caplog) == ["the timeline of rank 0 is full (3 tasks and spans); it ends here"]
    events = bars(read(observer.path))
    assert [event["name"] for event in events if event["cat"] == "forward"] == ["layer 0", "layer 1"]
    assert len(events) == 2 + 3


def test_any_thread_may_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = TraceObserver(tmp_path, 0, most_events=1000)
    barrier = threading.Barrier(4)

    def tell() -> None:
        barrier.wait(60)
        for number in range(500):
            observer.on_span("wait", "layer", number, number + 1)

    threads = [threading.Thread(target=tell, name="test-tell", daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    observer.close()
    assert len(bars(read(observer.path))) == 1000
    assert len(warnings(caplog)) == 1


def test_a_task_is_not_kept_alive_with_its_gradient(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, 0)
    data = bytearray(20)
    task = CommTask(0, 0, Partition(0, "float32", 0, 20, (0,)), memoryview(data))
    observer.on_task(task)
    del task
    data.clear()  # BufferError while anybody holds a view


def test_close_writes_once_and_records_nothing_more(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, 0)
    observer.on_span("forward", "layer", 1.0, 2.0)
    observer.close()
    before = observer.path.read_bytes()
    observer.on_span("forward", "too late", 3.0, 4.0)
    observer.on_task(make_task(1.0, 2.0, 3.0, 4.0))
    observer.close()
    assert observer.path.read_bytes() == before
    assert len(bars(read(observer.path))) == 1


def test_the_directory_is_for_its_owner_only(tmp_path: Path) -> None:
    TraceObserver(tmp_path / "new" / "run", 0).close()
    assert (tmp_path / "new" / "run").stat().st_mode & 0o777 == 0o700


def test_a_file_of_an_earlier_run_does_not_pass_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "trace.rank0.json").write_text('{"traceEvents": []}')
    TraceObserver(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_directory_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    observer = TraceObserver(tmp_path / "file" / "run", 0)
    observer.on_span("forward", "layer", 1.0, 2.0)
    observer.on_task(make_task(1.0, 2.0, 3.0, 4.0))
    observer.close()
    observer.merge()
    (said,) = warnings(caplog)
    assert said.startswith(f"no timeline of rank 0 in {tmp_path}/file/run: [Errno 20] Not a directory: ")


def test_a_full_disk_is_one_warning_and_leaves_no_half_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = TraceObserver(tmp_path, 0)
    observer.on_span("forward", "layer", 1.0, 2.0)

    def full(event: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("commsched.session.trace.json.dumps", full)
    observer.close()
    observer.merge()
    assert warnings(caplog) == [f"no timeline of rank 0 in {tmp_path}: [Errno 28] No space left on device"]
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_a_directory_that_others_may_write_leads_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("trace.rank0.unfinished", "trace.rank0.json", "trace.rank0.guessed.unfinished"):
        (run / name).symlink_to(treasure)
    observer = TraceObserver(run, 0)
    observer.close()
    assert read(observer.path)
    assert not observer.path.is_symlink()
    monkeypatch.setattr("commsched.session.trace.secrets.token_hex", lambda _: "guessed")
    TraceObserver(run, 0).close()
    assert warnings(caplog) == [
        f"no timeline of rank 0 in {run}: [Errno 17] File exists: '{run}/trace.rank0.guessed.unfinished'"
    ]
    assert treasure.read_text() == "gold"


def test_a_directory_that_is_gone_at_the_end_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = TraceObserver(tmp_path / "run", 0)
    (tmp_path / "run").rmdir()
    observer.close()
    observer.merge()
    assert len(warnings(caplog)) == 1


# --- steps, flows, credit ---


def trained(tmp_path: Path, steps: tuple[int, int] | None = None, count: int = 3) -> list[Event]:
    """Steps of a second: fc.weight's gradient is made at 0.1, ready at 0.2, sent at 0.4, averaged at 0.5, needed at 0.8."""
    observer = TraceObserver(tmp_path, 0, steps=steps, about={"transport": "ps"})
    observer.add_group(0, Manifest((TensorSpec("commsched.kept", (5,), "float32"),)))
    observer.add_group(1, MANIFEST)
    observer.on_span("forward", "before", -1.0, -0.9)
    for step in range(count):
        observer.on_step(0, step, step)
        observer.on_step(1, step, step)
        observer.on_span("backward", "fc.weight", step + 0.1, step + 0.2)
        observer.on_task(make_task(step + 0.2, step + 0.3, step + 0.4, step + 0.5, step=step, group=1))
        observer.on_span("forward", "fc", step + 0.8, step + 0.9)
    observer.close()
    return read(observer.path)


def test_a_step_is_a_bar_and_everything_says_its_step(tmp_path: Path) -> None:
    events = bars(trained(tmp_path))
    steps = [(each["name"], each["ts"], each["dur"]) for each in events if each["cat"] == "step"]
    assert steps == [("step 0", 0.0, 1e6), ("step 1", 1e6, 1e6), ("step 2", 2e6, 9e5)]
    assert [each["args"] for each in events if each["cat"] == "forward"] == [{}, {"step": 0}, {"step": 1}, {"step": 2}]


def test_arrows_lead_from_a_gradient_to_the_forward_that_needed_it(tmp_path: Path) -> None:
    events = trained(tmp_path)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    arrows = [(each["ph"], tracks[each["tid"]], each["ts"] / 1e6) for each in events if each.get("id") == "0.2"]
    way = [
        ("s", "backward", 1.15),
        ("t", "queue", 1.2),
        ("t", "send", 1.3),
        ("t", "reply", 1.4),
        ("f", "forward", 1.8),
    ]
    assert [each[:2] for each in arrows] == [each[:2] for each in way]
    assert [each[2] for each in arrows] == pytest.approx([each[2] for each in way])
    [sent] = [each for each in bars(events) if each["cat"] == "send" and each["args"]["step"] == 1]
    assert (sent["args"]["needed_by"], sent["args"]["needed_ms_after_ready"]) == ("fc", 600.0)


def test_what_no_forward_shows_is_needed_when_it_is_waited_for(tmp_path: Path) -> None:
    observer = TraceObserver(tmp_path, 0)
    observer.add_group(0, MANIFEST)
    for step in range(2):
        observer.on_step(0, step, step)
        observer.on_task(make_task(step + 0.2, step + 0.3, step + 0.4, step + 0.5, step=step, tensors=(0,)))
    observer.on_span("wait", "conv.weight", 0.45, 0.5)
    observer.close()
    needed = [each["args"].get("needed_by") for each in bars(read(observer.path)) if each["cat"] == "send"]
    assert needed == ["conv.weight", None]  # the second was not waited for


def test_the_credit_in_use_is_a_counter(tmp_path: Path) -> None:
    counted = [(each["ts"] / 1e6, each["args"]["bytes"]) for each in trained(tmp_path, count=1) if each["ph"] == "C"]
    assert counted == [(0.3, 20), (0.4, 0)]


def test_some_steps_are_shown_and_no_others(tmp_path: Path) -> None:
    events = bars(trained(tmp_path, (2, 3), count=6))
    for track in ("queue", "send", "reply", "forward", "backward"):
        assert [each["args"]["step"] for each in events if each["cat"] == track] == [2, 3], track
    assert [each["name"] for each in events if each["cat"] == "step"][:2] == ["step 2", "step 3"]


@pytest.mark.parametrize("steps", [None, (1, 2)])
def test_a_second_model_has_steps_of_its_own_once_the_first_is_released(tmp_path: Path, steps: tuple[int, int] | None) -> None:
    observer = TraceObserver(tmp_path, 0, steps=steps)
    observer.add_group(0, MANIFEST)
    observer.add_group(1, Manifest((TensorSpec("head", (5,), "float32"),)))
    for group, begin, name in ((0, 0, "fc"), (1, 10, "head")):
        for step in range(4):
            observer.on_step(group, step, begin + step)
            observer.on_span("forward", name, begin + step + 0.2, begin + step + 0.5)
            if (group, step) == (0, 2):
                break
        observer.on_release(group, begin + step + 0.9)
    observer.close()
    events = bars(read(observer.path))
    shown = [(each["name"], each["args"]["step"]) for each in events if each["cat"] == "forward"]
    wanted = [("fc", 0), ("fc", 1), ("fc", 2), ("head", 0), ("head", 1), ("head", 2), ("head", 3)]
    assert shown == [each for each in wanted if steps is None or each[1] in (1, 2)]
    ends = [each["ts"] + each["dur"] for each in events if each["cat"] == "step" and each["args"]["group"] == 0]
    assert max(ends) == pytest.approx(2.9e6)


def test_a_file_says_what_it_is_of(tmp_path: Path) -> None:
    trained(tmp_path)
    merge(tmp_path)
    about = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert about["transport"] == "ps"
    assert about["rank"] == 0
    assert about["unix_seconds_at_time_0"] > 0


# --- merging ---


def write_ranks(directory: Path, *ranks: int) -> None:
    observers = {rank: TraceObserver(directory, rank) for rank in ranks}  # all ranks open before one of them closes
    for rank, observer in observers.items():
        observer.on_span("forward", f"layer of {rank}", 1.0, 2.0)
        observer.close()


def test_merge_puts_all_ranks_in_one_file(tmp_path: Path) -> None:
    write_ranks(tmp_path, 10, 0, 2)
    assert merge(tmp_path) == tmp_path / "trace.json"
    events = read(tmp_path / "trace.json")
    assert [event["pid"] for event in bars(events)] == [0, 2, 10]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 2", "rank 10"]
    separate = [event for rank in (0, 2, 10) for event in read(tmp_path / f"trace.rank{rank}.json")]
    assert events == separate


def test_merge_takes_no_other_file_and_may_be_repeated(tmp_path: Path) -> None:
    write_ranks(tmp_path, 0)
    (tmp_path / "trace.rank1.unfinished").write_text("{")
    (tmp_path / "trace.rankX.json").write_text("{")
    (tmp_path / "notes.json").write_text("{")
    first = merge(tmp_path).read_bytes()
    assert merge(tmp_path).read_bytes() == first


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"traceEvents": 3}', b"\xff\xfe"])
def test_merge_leaves_out_a_file_it_cannot_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    write_ranks(tmp_path, 0)
    (tmp_path / "trace.rank1.json").write_bytes(content)
    assert [event["pid"] for event in bars(read(merge(tmp_path)))] == [0]
    (said,) = warnings(caplog)
    assert said.startswith(f"the timeline {tmp_path}/trace.rank1.json is left out: it cannot be read: ")


def test_rank_0_merges_what_all_ranks_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    observer = TraceObserver(tmp_path, 0)
    write_ranks(tmp_path, 1)
    observer.on_span("forward", "layer of 0", 1.0, 2.0)
    observer.close()
    observer.merge()
    assert [event["pid"] for event in bars(read(tmp_path / "trace.json"))] == [0, 1]
    assert warnings(caplog) == []


def test_what_an_earlier_job_of_more_ranks_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    write_ranks(tmp_path, 0, 1, 2)
    merge(tmp_path)
    TraceObserver(tmp_path, 0)  # of a job that is killed then
    assert list(tmp_path.iterdir()) == []


def test_merge_does_not_wait_for_a_pipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_ranks(tmp_path, 0)
    os.mkfifo(tmp_path / "trace.rank1.json")
    merge(tmp_path)
    assert "trace.rank1.json is left out: it cannot be read: it is no file" in caplog.text


def test_merge_says_when_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"^there is no trace.rank\\*.json in {tmp_path}$"):
        merge(tmp_path)


# --- with a Core ---


class SendsAtOnce(RecordingTransport):
    def start(self, task: CommTask, completion: Completion) -> None:
        completion.on_sent(task)
        completion.on_done(task)


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[TraceObserver]:
    observer = TraceObserver(tmp_path, 0)
    yield observer
    observer.close()


def test_a_core_tells_of_every_partition_of_every_step(observer: TraceObserver) -> None:
    core = Core(SendsAtOnce(), SchedulerConfig(8, 16), observer=observer)
    observer.add_group(core.group_count, MANIFEST)
    group = core.add_group(cut(MANIFEST, 8), {"float32": memoryview(bytearray(60))})
    for _ in range(3):
        group.begin_step()
        for tensor in (2, 1, 0):
            group.notify_ready(tensor)
    core.drain()
    core.close()  # the last task is told of before the dispatcher ends
    observer.close()
    events = read(observer.path)
    require_no_overlap(events)
    sent = [(event["args"]["step"], event["args"]["partition"]) for event in bars(events) if event["cat"] == "send"]
    assert sorted(sent) == list(itertools.product(range(3), range(9)))


@pytest.mark.parametrize(("steps", "most", "named"), [((10, 20), 1000, 0), (None, 3, 2), (None, 1000, 30)])
def test_of_groups_that_are_not_shown_nothing_is_kept(
    tmp_path: Path, steps: tuple[int, int] | None, most: int, named: int
) -> None:
    """A job may average a value of its own in each step, long before and after the steps of the timeline."""
    observer = TraceObserver(tmp_path, 0, steps=steps, most_events=most)
    for group in range(30):
        observer.add_group(group, MANIFEST)
        observer.on_step(group, 0, float(group))
        observer.on_task(make_task(*[group + 0.5] * 4, step=0, group=group))
        observer.on_release(group, group + 0.75)
    assert len(observer._names) == len(observer._nbytes) == len(observer._released_at) == named
    observer.close()


def test_a_core_tells_of_a_group_that_is_released(observer: TraceObserver) -> None:
    core = Core(SendsAtOnce(), SchedulerConfig(8, 16), observer=observer)
    observer.add_group(core.group_count, MANIFEST)
    group = core.add_group(cut(MANIFEST, 8), {"float32": memoryview(bytearray(60))})
    for _ in range(2):
        group.begin_step()
        group.notify_all_ready((0, 1, 2))
    core.drain()
    group.release()
    core.close()
    after = time.monotonic()
    observer.on_span("other", "later", after, after + 1.0)
    observer.close()
    events = read(observer.path)
    assert max(each["ts"] + each["dur"] for each in bars(events) if each["cat"] == "step") < after * 1e6
    assert [each["args"] for each in bars(events) if each["name"] == "later"] == [{}]
