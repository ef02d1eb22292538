import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from commsched.core.errors import ConfigError
from commsched.core.scheduler import SchedulerConfig
from commsched.tuner.journal import Journal, Trial
from commsched.tuner.result import Verdict
from commsched.tuner.trials import Window

KEY = {"model": "abc", "world_size": 4, "policies": ["priority"], "from": SchedulerConfig().to_record()}
TRIALS = [
    Trial("search", SchedulerConfig(), Window(0.4, 0.01, 10), 5.0, 13),
    Trial("search", SchedulerConfig(1_000_000), None, 1.5, 13, "rank 1: 12 of 20 steps were disturbed"),
    Trial("search", SchedulerConfig(2_000_000, 8_000_000, "fifo", 500_000, "rsag"), Window(0.3, 0.02, 20, 3), 6.25, 26),
    Trial("compare", SchedulerConfig(), Window(0.41, 0.01, 10), 5.5, 13),
]
VERDICT = Verdict("kept", TRIALS[2].config, SchedulerConfig(), TRIALS[2].config, 3, 1, 60, 18.25, 0.2, 0.1, 0.3, 4, 0.41, 0.3)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


Open = Callable[..., Journal]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.jsonl"


@pytest.fixture
def open_journal(path: Path) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_again(key: dict[str, Any] = KEY) -> Journal:
            stack.close()
            return stack.enter_context(closing(Journal(path, key)))

        yield open_again


def test_what_was_kept_is_there_when_it_is_opened_again(path: Path, open_journal: Open) -> None:
    journal = open_journal()
    assert journal.trials == []
    for trial in TRIALS:
        journal.add(trial)
    again = open_journal()
    assert again.trials == TRIALS
    assert again.verdict is None
    again.end(VERDICT)
    assert open_journal().verdict == VERDICT


def test_each_line_stands_for_itself(path: Path, open_journal: Open) -> None:
    journal = open_journal()
    for trial in TRIALS:
        journal.add(trial)
    journal.end(VERDICT)
    records = lines(path)
    assert all(record["schema"] == 1 and record["key"] == KEY for record in records)
    assert [record["phase"] for record in records] == ["search", "search", "search", "compare", "verdict"]
    assert [record["trial"] for record in records[:4]] == [0, 1, 2, 3]
    ok, failed, *_, verdict = records
    assert (ok["status"], ok["seconds"], ok["error_seconds"], ok["steps"], ok["rejected"]) == ("ok", 0.4, 0.01, 10, 0)
    assert ok["config"] == SchedulerConfig().to_record()
    assert (failed["status"], failed["seconds"], failed["why"]) == ("failed", None, "rank 1: 12 of 20 steps were disturbed")
    assert (verdict["reason"], verdict["kept"]) == ("kept", VERDICT.kept.to_record())
    assert verdict["sentence"] == VERDICT.sentence()


def test_each_trial_is_on_the_disk_before_add_returns(path: Path, open_journal: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: on_disk.append(os.fstat(file).st_size))
    journal = open_journal()
    journal.add(TRIALS[0])
    journal.add(TRIALS[1])
    assert on_disk == [len(line) for line in (path.read_bytes().splitlines(True)[0], path.read_bytes())]


def test_wherever_a_write_was_cut_off_whole_lines_remain_and_more_can_be_added(path: Path, open_journal: Open) -> None:
    journal = open_journal()
    for trial in TRIALS:
        journal.add(trial)
    whole = path.read_bytes()
    start_of_last = whole[:-1].rfind(b"\n") + 1
    for length in (0, 1, *range(start_of_last, len(whole) + 1, 9), len(whole) - 1):
        path.write_bytes(whole[:length])
        torn = open_journal()
        kept = whole[:length].count(b"\n")
        assert torn.trials == TRIALS[:kept]
        torn.add(TRIALS[0])
        assert [record["trial"] for record in lines(path)] == list(range(kept + 1))


def test_another_search_is_refused_by_what_differs(path: Path, open_journal: Open) -> None:
    journal = open_journal()
    journal.add(TRIALS[0])
    journal.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"tuned.jsonl' is of another search: world_size is 4 there and 2 here; remove it"):
        Journal(path, {**KEY, "world_size": 2})
    with pytest.raises(ConfigError, match="link is None there and 'eth0' here"):
        Journal(path, {**KEY, "link": "eth0"})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"partition = 4000000", "JSONDecodeError"),
        (b"[]", "TypeError"),
        (b'{"schema": 2}', "schema 2 instead of 1"),
        (b'{"schema": 1}', "KeyError: 'key'"),
        (b'"\xff"', "UnicodeDecodeError"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(path: Path, line: bytes, why: str) -> None:
    path.write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=rf"tuned.jsonl', line 1, is not a line of a journal of tuning .*{why}"):
        Journal(path, KEY)
    assert path.read_bytes() == line + b"\n"


def test_an_unfinished_line_of_something_else_is_left_as_it_is(path: Path) -> None:
    path.write_text("# notes")
    with pytest.raises(ConfigError, match=r"tuned.jsonl', line 1, is not a line of a journal of tuning \(not whole\)"):
        Journal(path, KEY)
    assert path.read_text() == "# notes"


def test_a_line_that_lacks_something_is_refused_by_its_number(path: Path) -> None:
    record = {"schema": 1, "key": KEY, "trial": 0, **TRIALS[0].to_record()}
    path.write_text("\n".join(json.dumps(one) for one in (record, {**record, "config": {"partition": 4}})) + "\n")
    with pytest.raises(ConfigError, match=r"line 2, .*TypeError"):
        Journal(path, KEY)


@pytest.mark.parametrize("seconds", [0, float("nan"), "soon", None])
def test_a_line_with_a_time_that_cannot_be_is_refused_by_its_number(path: Path, seconds: object) -> None:
    record = {"schema": 1, "key": KEY, "trial": 0, **TRIALS[0].to_record()}
    path.write_text(json.dumps({**record, "seconds": seconds}) + "\n")
    with pytest.raises(ConfigError, match="line 1, is not a line of a journal of tuning"):
        Journal(path, KEY)


def test_it_can_start_over(path: Path, open_journal: Open) -> None:
    journal = open_journal()
    journal.add(TRIALS[0])
    journal.end(VERDICT)
    journal.start_over()
    assert (journal.trials, journal.verdict) == ([], None)
    journal.add(TRIALS[1])
    assert [record["phase"] for record in lines(path)] == ["search", "verdict", "restart", "search"]  # nothing is lost
    assert lines(path)[-1]["trial"] == 0
    again = open_journal()
    assert (again.trials, again.verdict) == (TRIALS[1:2], None)


def test_searches_for_several_models_of_one_job_may_stand_side_by_side(path: Path) -> None:
    other = {**KEY, "model": "xyz"}
    with closing(Journal(path, KEY)) as journal:
        journal.add(TRIALS[0])
    with closing(Journal(path, other, beside_others=True)) as journal:
        assert journal.trials == []
        journal.add(TRIALS[1])
        journal.add(TRIALS[2])
    for key, trials in ((KEY, TRIALS[:1]), (other, TRIALS[1:3])):
        with closing(Journal(path, key)) as journal:
            assert journal.trials == trials
    with pytest.raises(ConfigError, match="is of another search: model is 'abc' there and 'pqr' here"):
        Journal(path, {**KEY, "model": "pqr"})


def test_where_it_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the journal of tuning '.*nowhere/t.jsonl' cannot be written: No such file"):
        Journal(tmp_path / "nowhere" / "t.jsonl", KEY)
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        Journal(tmp_path, KEY)


def test_a_full_disk_is_not_silent(path: Path, open_journal: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = open_journal()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.add(TRIALS[0])
    assert journal.trials == []


_HOLD = """
import sys
from commsched.tuner.journal import Journal
journal = Journal(sys.argv[1], {})
print("open", flush=True)
sys.stdin.read()
"""


def test_two_sessions_of_a_process_cannot_write_one_journal(path: Path) -> None:
    """The lock is the process's: closing the second would also give up the first one's."""
    with closing(Journal(path, KEY)):
        (path.parent / "link.jsonl").symlink_to(path)
        for name in (path, path.parent / "link.jsonl"):
            with pytest.raises(ConfigError, match="is in use by another session of this process"):
                Journal(name, KEY)
    Journal(path, KEY).close()


def test_two_jobs_cannot_write_one_journal(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "open\n"
            with pytest.raises(ConfigError, match=r"tuned.jsonl' is in use by another job"):
                Journal(path, {})
        finally:
            holder.kill()
    Journal(path, {}).close()  # free as soon as that process is gone
