"""Partition and credit of a job that sets nothing, as a user sees them."""

from __future__ import annotations

import re
import sys

import pytest

from tests.jobs.job import ROOT, run_job

TRAINING = (sys.executable, str(ROOT / "tests" / "jobs" / "training.py"))


def weights(out: str) -> set[str]:
    return set(re.findall(r"weights (\w+)", out))


def lines_of_sizes(err: str) -> list[str]:
    """The lines of a job but those on what its communication costs, and on a rank that another process makes slow."""
    costs = list(re.finditer(r"commsched: after \d+ steps, a step takes .*\n(commsched: .*\n)*", err))
    assert len(costs) <= 1
    lines = (err[: costs[0].start()] if costs else err).splitlines()
    return [line for line in lines if " is slow: it takes " not in line]


@pytest.mark.parametrize("transport", ["ps", "gloo"])
def test_sizes_choose_themselves_and_the_weights_are_those_of_set_sizes(transport: str) -> None:
    job = ("-n", "2", "--transport", transport)
    code, out, err = run_job(*job, "--", *TRAINING, "20", "--settle", "--width", "400")
    assert code == 0, err
    first, chosen = lines_of_sizes(err)
    assert re.search(r", partition [\d.]+ KB at first, credit [\d.]+ [KM]B at first, priority", first)
    sizes = r"partition [\d.]+ [KM]B, credit [\d.]+ [KM]B(, static order)?"
    assert re.match(rf"commsched: {sizes} chosen: steps of [\d.]+ ms.*; simulated with a network of ", chosen)
    [steps] = set(re.findall(r"steps (\d+)", out))
    given = ("--partition", "100KB", "--credit", "300KB")
    code, fixed, err = run_job(*job, *given, "--", *TRAINING, steps, "--width", "400")
    assert code == 0, err
    _, *chosen = lines_of_sizes(err)
    assert all(re.match(r"commsched: an? (agreed|static) order chosen: steps of [\d.]+ ms \(with ", line) for line in chosen)
    assert len(chosen) == (transport == "gloo")
    assert len(weights(out)) == 1
    assert weights(out) == weights(fixed)


def test_a_job_too_short_for_a_choice_ends_as_ever() -> None:
    code, out, err = run_job("-n", "2", "--", *TRAINING, "8", "--width", "400")
    assert code == 0, err
    assert len(err.splitlines()) == 1
    assert len(weights(out)) == 1


def test_ranks_that_leave_different_sizes_open_are_refused() -> None:
    uneven = (
        f"import os, runpy; os.environ.update(COMMSCHED_PARTITION='1MB' if os.environ['COMMSCHED_RANK'] == '1' else 'auto'); \
import sys; sys.argv[1:] = ['5']; runpy.run_path({TRAINING[1]!r}, run_name='__main__')"
    )
    code, _, err = run_job("-n", "2", "--", sys.executable, "-c", uneven)
    assert code != 0
    assert "partition is auto on rank 0" in err
