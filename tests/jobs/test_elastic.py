"""Elastic jobs of real processes: who is lost is replaced, or missed; the weights are right; nothing is left."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from .elastic_ends import RANK, STEPS, ended, nothing_left, undisturbed_end
from .job import Job, run_job
from .kept import TOKEN, kept_server


def run(directory: Path, options: list[str], *strikes: str, temporary: Path | None = None) -> tuple[int, str, str]:
    directory.mkdir()
    environ = {} if temporary is None else {"TMPDIR": str(temporary)}
    return run_job(*options, "--", sys.executable, RANK, str(STEPS), str(directory), *strikes, environ=environ)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return undisturbed_end()


def test_killed_ranks_are_replaced_and_the_weights_are_those_of_a_run_without_loss(tmp_path: Path, undisturbed: str) -> None:
    options = ["-n", "2", "--elastic", "--max-restarts", "2", "--standby"]
    code, out, err = run(tmp_path / "job", options, "backward:1:2:kill", "forward:0:5:kill")
    assert code == 0, err
    assert ended(out) == {0: undisturbed, 1: undisturbed}
    assert re.findall(r"commsched run: rank (\d) \(pid \d+\) was killed by SIGKILL\n", err) == ["1", "0"]
    assert re.findall(r"commsched run: rank (\d) is replaced; restarts left: (\d)\n", err) == [("1", "1"), ("0", "0")]
    assert nothing_left(out)


def test_without_restarts_the_others_go_on(tmp_path: Path) -> None:
    options = ["-n", "3", "--elastic", "--min", "2", "--max-restarts", "0"]
    code, out, err = run(tmp_path / "job", options, "stepped:0:4:raise")
    assert code == 0, err
    ends = ended(out)
    assert sorted(ends) == [0, 1]
    [end] = set(ends.values())
    [step] = re.findall(r"commsched run: the job goes on with 2 ranks instead of 3, from step (\d)\n", err)
    sizes = [f"{number}/{3 if number < int(step) else 2}" for number in range(STEPS)]
    assert end.split()[2:] == sizes
    assert "ValueError: boom" in err
    assert nothing_left(out)


def test_a_rank_that_ends_its_loop_by_itself_is_a_loss(tmp_path: Path) -> None:
    """Others need it, so its end tells it of a failure, which is its own."""
    options = ["-n", "2", "--elastic", "--max-restarts", "0"]
    code, out, err = run(tmp_path / "job", options, "forward:1:4:quit")
    assert code == 1
    assert "the job cannot go on: 1 rank is left, fewer than --min 2, and no restart (--max-restarts)" in err
    assert "is replaced" not in err
    assert nothing_left(out)


def test_a_killed_server_is_replaced(tmp_path: Path, undisturbed: str) -> None:
    temporary = tmp_path / ("long" * 30)  # longer than the address of a Unix socket may be
    temporary.mkdir()
    options = ["-n", "2", "--servers", "1", "--elastic"]
    code, out, err = run(tmp_path / "job", options, "forward:s0:3:kill", temporary=temporary)
    assert code == 0, err
    assert ended(out) == {0: undisturbed, 1: undisturbed}
    assert nothing_left(out)


@pytest.mark.parametrize(
    ("options", "strike"),
    [
        (["--transport", "ps"], "placed:1:2:kill"),  # before it joins the control channel, at which rank 0 waits for it
        (["--servers", "1"], "placed:s0:2:kill"),
        (["--transport", "gloo"], "connecting:1:2:kill"),
    ],
    ids=["ps", "server", "gloo"],
)
def test_nobody_waits_for_who_is_lost_while_a_generation_opens(
    tmp_path: Path, undisturbed: str, options: list[str], strike: str
) -> None:
    fail_after = "8" if "gloo" in options else "60"  # which is how long they would wait; gloo's own thread does so
    options = ["-n", "2", "--elastic", *options, "--fail-after", fail_after]
    code, out, err = run(tmp_path / "job", options, "backward:1:2:kill", strike)
    assert code == 0, err
    assert ended(out) == {0: undisturbed, 1: undisturbed}
    lost = r"server 0" if "s0" in strike else r"rank 1"
    assert re.search(rf"rank 0: generation 2 did not begin: {lost} \((pid \d+|host .*)\) (has ended|is gone)", err), err
    assert nothing_left(out)


def test_a_frozen_rank_is_killed_and_replaced(tmp_path: Path, undisturbed: str) -> None:
    code, out, err = run(tmp_path / "job", ["-n", "2", "--elastic", "--fail-after", "1"], "forward:1:3:stop")
    assert code == 0, err
    assert ended(out) == {0: undisturbed, 1: undisturbed}
    assert re.search(r"commsched run: rank 1 \(pid \d+\) is killed: it was (silent|stopped)\n", err), err
    assert nothing_left(out)


def test_a_rank_that_gets_sigterm_leaves_after_the_step_in_hand(tmp_path: Path) -> None:
    options = ["-n", "2", "--elastic", "--min", "1", "--max-restarts", "0"]
    code, out, err = run(tmp_path / "job", options, "forward:1:3:term")
    assert code == 0, err
    assert ended(out)[0].split()[2:] == [f"{number}/{2 if number < 4 else 1}" for number in range(STEPS)]
    assert re.findall(r"^commsched run: (.*)$", re.sub(r" \(pid \d+\)", "", err), re.MULTILINE) == [
        "rank 1 leaves",
        "the job goes on with 1 rank instead of 2, from step 4",
    ]
    assert nothing_left(out)


def test_a_rank_that_leaves_and_is_stopped_in_its_end_is_killed_and_that_is_no_failure(tmp_path: Path) -> None:
    options = ["-n", "2", "--elastic", "--min", "1", "--max-restarts", "0"]
    code, out, err = run(tmp_path / "job", options, "forward:1:3:term", "left:0:0:stop")
    assert code == 0, err
    assert ended(out)[0].split()[2:] == [f"{number}/{2 if number < 4 else 1}" for number in range(STEPS)]
    assert re.search(r"^commsched run: rank 1 \(pid \d+\) is killed: it was stopped$", err, re.MULTILINE), err
    assert nothing_left(out)


def test_all_ranks_leave_when_the_launcher_gets_sigterm(tmp_path: Path) -> None:
    code, out, err = run(tmp_path / "job", ["-n", "2", "--elastic"], "forward:l1:3:term")
    assert code == 128 + signal.SIGTERM, err
    assert len(re.findall(r"^left \d+$", out, re.MULTILINE)) == 2
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "commsched run: SIGTERM has ended the job: ranks 0, 1 ended without an error"
    assert nothing_left(out)


def test_a_rank_that_waits_for_a_new_process_leaves_when_the_launcher_gets_sigterm(tmp_path: Path) -> None:
    command = ["--", sys.executable, RANK, str(STEPS), str(tmp_path), "forward:1:3:kill", "begin:1:1:wait"]
    with Job("-n", "2", "--elastic", *command) as job:
        out = job.lines_until("begin:1:1:wait")
        job.process.send_signal(signal.SIGTERM)
        code, rest, err = job.end()
    assert code == 128 + signal.SIGTERM, err
    assert len(re.findall(r"^left \d+$", rest, re.MULTILINE)) == 1
    assert "Traceback" not in err
    said = re.sub(r" \(pid \d+\)", "", err.splitlines()[-1])
    assert said == "commsched run: SIGTERM has ended the job: rank 0 ended without an error; rank 1 ended by it"
    assert nothing_left("\n".join(out) + rest)


def test_a_rank_that_is_lost_after_the_loop_ends_the_job_with_its_exit_code(tmp_path: Path) -> None:
    code, out, err = run(tmp_path / "job", ["-n", "2", "--elastic"], f"after:1:{STEPS}:exit")
    assert code == 3
    assert re.search(r"commsched run: the job cannot go on: .* has failed after the last step\n", err), err
    assert re.search(r"commsched run: rank 1 \(pid \d+\) ended with exit code 3", err.splitlines()[-1])
    assert nothing_left(out)


def test_one_rank_too_few_ends_the_job_with_its_exit_code(tmp_path: Path) -> None:
    code, out, err = run(tmp_path / "job", ["-n", "2", "--elastic", "--max-restarts", "0"], "start:1:2:exit")
    assert code == 3
    assert "commsched run: the job cannot go on: 1 rank is left, fewer than --min 2, and no restart (--max-restarts)\n" in err
    assert re.search(r"commsched run: rank 1 \(pid \d+\) ended with exit code 3", err.splitlines()[-1])
    assert nothing_left(out)


def test_a_server_that_was_killed_is_left_out_and_used_again_when_it_is_back(tmp_path: Path, undisturbed: str) -> None:
    strikes = ["start:0:2:wait", "start:0:5:wait", "forward:1:6:kill"]  # not before rank 0 has waited
    with kept_server() as (one, first), kept_server() as (other, second):
        environ = {"COMMSCHED_TOKEN": TOKEN, "COMMSCHED_SERVERS": f"{first},{second}", "COMMSCHED_FAIL_AFTER": "60"}
        command = ["--", sys.executable, RANK, str(STEPS), str(tmp_path), *strikes]
        with Job("-n", "2", "--elastic", *command, environ=environ) as job:
            out = job.lines_until("start:0:2:wait")
            one.kill()
            one.wait(60)
            (tmp_path / "start:0:2:wait.go").touch()
            out += job.lines_until("start:0:5:wait")
            with kept_server(first) as (again, _):
                (tmp_path / "start:0:5:wait.go").touch()
                code, rest, err = job.end()
                again.terminate()
                assert "commsched server: the job has ended; ready for the next\n" in again.communicate(timeout=60)[1]
            other.terminate()
            said = other.communicate(timeout=60)[1]
    assert code == 0, err
    assert ended(rest) == {0: undisturbed, 1: undisturbed}
    lines = re.findall(r"^commsched run: (.*)$", re.sub(r" \(pid \d+\)|, from step \d", "", err), re.MULTILINE)
    assert lines == [
        f"the server at {first} is left out: nobody answers there",
        "a connection or a server was lost, and no rank had failed; restarts left: 2",
        "the job goes on with 2 ranks",
        "rank 1 was killed by SIGKILL",
        "rank 1 is replaced; restarts left: 1",
        f"the server at {first} takes part now",
        "the job goes on with 2 ranks",
    ]
    assert [line.split(": ")[1] for line in said.splitlines()[-3:]] == ["the job has failed"] * 2 + [
        "the job has ended; ready for the next"
    ]
    assert nothing_left("\n".join(out) + rest)
