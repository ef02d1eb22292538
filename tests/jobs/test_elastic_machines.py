"""Elastic jobs of several machines, each with a launcher (``machines.py``)."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .elastic_ends import RANK, STEPS, ended, nothing_left, undisturbed_end
from .kept import kept_server
from .machines import Hosts, Machines, ends, open_hosts

OPTIONS = ("-n", "2", "--elastic", "--local", "1")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with open_hosts(3) as opened:
        yield opened


@pytest.fixture
def machines(hosts: Hosts, tmp_path: Path) -> Iterator[Machines]:
    """Two ranks that make STEPS steps."""
    with Machines(hosts, [sys.executable, RANK, str(STEPS), str(tmp_path)]) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return undisturbed_end()


def said(err: str) -> str:
    return re.sub(r"\(pid \d+ ", "(", err)


def test_ranks_of_two_machines_are_replaced_also_rank_0(machines: Machines, undisturbed: str) -> None:
    options, strikes = [*OPTIONS, "--max-restarts", "2"], ["backward:1:2:kill", "forward:0:5:kill"]
    first, second = machines.launch(0, options, *strikes), machines.launch(1, options, *strikes)
    (code, out, err), (its_code, its_out, its_err) = ends(first, second)
    assert (code, its_code) == (0, 0), err + its_err
    assert ended(out) == {0: undisturbed}
    assert ended(its_out) == {1: undisturbed}
    one, two, _ = machines.addresses
    assert re.findall(r"commsched run: (.*) was killed by SIGKILL\n", said(err)) == [f"rank 1 (at {two})", f"rank 0 (at {one})"]
    assert nothing_left(out + its_out)


def test_a_lost_machine_is_replaced_by_a_spare_one(machines: Machines, undisturbed: str) -> None:
    options, strikes = [*OPTIONS, "--security", "tls"], ["forward:l1:3:lost"]
    jobs = [machines.launch(machine, options, *strikes) for machine in range(3)]
    all_ends = ends(*jobs)
    assert sorted(code for code, _, _ in all_ends) == [-signal.SIGKILL, 0, 0], all_ends
    outs = "".join(out for _, out, _ in all_ends)
    assert ended(outs) == {0: undisturbed, 1: undisturbed}
    assert ended(all_ends[0][1]) == {0: undisturbed}
    lost = next(address for address, (code, _, _) in zip(machines.addresses, all_ends, strict=True) if code != 0)
    assert f"commsched run: the launcher at {lost} is lost (it ended the connection), and with it rank 1\n" in all_ends[0][2]
    assert nothing_left(outs)


def test_a_machine_that_comes_back_is_waited_for(machines: Machines, undisturbed: str) -> None:
    options, strikes = [*OPTIONS], ["stepped:l1:4:kill"]
    first, second = machines.launch(0, options, *strikes), machines.launch(1, options, *strikes)
    _, lost_out, _ = second.end()
    again = machines.launch(1, options, *strikes)
    (code, out, err), (its_code, its_out, its_err) = ends(first, again)
    assert (code, its_code) == (0, 0), err + its_err
    assert ended(out + its_out) == {0: undisturbed, 1: undisturbed}
    assert "rank 1 is replaced, as soon as a machine has room for it; restarts left: 2\n" in err
    assert nothing_left(lost_out + out + its_out)


def test_a_launcher_that_gets_sigterm_lets_its_ranks_leave(machines: Machines) -> None:
    options, strikes = [*OPTIONS, "--min", "1", "--max-restarts", "0"], ["forward:l1:3:term"]
    first, second = machines.launch(0, options, *strikes), machines.launch(1, options, *strikes)
    (code, out, err), (its_code, its_out, its_err) = ends(first, second)
    assert (code, its_code) == (0, 128 + signal.SIGTERM), err + its_err
    assert ended(out)[0].split()[2:] == [f"{number}/{2 if number < 4 else 1}" for number in range(STEPS)]
    assert re.search(r"^left \d+$", its_out, re.MULTILINE)
    assert "commsched run: the job goes on with 1 rank instead of 2, from step 4\n" in err
    assert nothing_left(out + its_out)


def test_the_job_ends_with_the_launcher_that_hosts_it(machines: Machines) -> None:
    options, strikes = [*OPTIONS], ["forward:l0:3:lost"]
    first, second = machines.launch(0, options, *strikes), machines.launch(1, options, *strikes)
    (code, out, _), (its_code, its_out, its_err) = ends(first, second)
    assert (code, its_code) == (-signal.SIGKILL, 1)
    assert "which hosts the job, is lost (it ended the connection), and the job with it\n" in its_err
    assert nothing_left(out + its_out)


def test_launchers_that_do_not_fit_are_refused_by_name(machines: Machines) -> None:
    first = machines.launch(0, [*OPTIONS], COMMSCHED_JOB="a")
    other_bounds = machines.launch(1, [*OPTIONS, "--min", "1"], COMMSCHED_JOB="a")
    other_token = machines.launch(1, [*OPTIONS], COMMSCHED_JOB="a", COMMSCHED_TOKEN="0" * 64)
    other_job = machines.launch(1, [*OPTIONS], COMMSCHED_JOB="b")
    encrypted = machines.launch(1, [*OPTIONS, "--security", "tls"], COMMSCHED_JOB="a")
    all_ends = ends(other_bounds, other_token, other_job, encrypted)
    assert [(code, out) for code, out, _ in all_ends] == [(2, "")] * 4
    one = machines.addresses[0]
    bounds, token, job, encryption = (err.splitlines()[-1] for _, _, err in all_ends)
    assert bounds.endswith(f"does not take this one: --min is 1 there, and 2 at {one}; give all launchers the same")
    assert token.endswith(" has another token; set the same COMMSCHED_TOKEN everywhere")
    assert job.endswith("does not take this one: it is of the job 'a', and this launcher of 'b'")
    assert encryption.endswith(
        "does not speak as a launcher of an elastic job with security=tls; give all ranks and servers the same settings"
    )
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 128 + signal.SIGTERM


def test_a_launcher_without_a_host_says_so(machines: Machines) -> None:
    if machines.are_apart:  # else every launcher may host
        code, _, err = machines.launch(1, [*OPTIONS], COMMSCHED_JOIN_WITHIN="0.1").end()
        assert code == 2
        assert "ConfigError: no launcher of this job answers at control=" in err
    code, _, err = machines.launch(0, [*OPTIONS], COMMSCHED_JOIN_WITHIN="1").end()
    assert code == 1
    assert "commsched run: the job cannot go on: no machine with room for rank 1 has come within 1 s\n" in err


def test_servers_on_a_machine_of_their_own_serve_every_generation(machines: Machines, undisturbed: str) -> None:
    options, strikes = [*OPTIONS, "--security", "tls"], ["backward:1:2:kill"]
    environ = {"COMMSCHED_TOKEN": "0123456789abcdef", "COMMSCHED_SECURITY": "tls"}
    bind = f"{machines.addresses[2]}:0"
    with (
        kept_server(bind, machines.within[2], **environ) as (one, first),
        kept_server(bind, machines.within[2], **environ) as (_, second),
    ):
        given = {**environ, "COMMSCHED_SERVERS": f"{first},{second}"}
        jobs = [machines.launch(machine, options, *strikes, **given) for machine in range(2)]
        (code, out, err), (its_code, its_out, its_err) = ends(*jobs)
        assert (code, its_code) == (0, 0), err + its_err
        assert ended(out + its_out) == {0: undisturbed, 1: undisturbed}
        one.terminate()
        said = one.communicate(timeout=60)[1].splitlines()
    assert [line.split(": ")[1] for line in said] == ["the job has failed", "the job has ended; ready for the next"]
    assert nothing_left(out + its_out)
