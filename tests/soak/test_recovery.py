"""The soak of recovery, without its jobs: its plans, and how it names losses."""

from __future__ import annotations

import argparse

import pytest

from tests.soak import recovery


def test_each_loss_has_a_name_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    recovery.add_arguments(parser)
    plans = recovery.plans("numpy", parser.parse_args([]))
    assert [plan.transport for plan in plans] == ["ps"] * 4 + ["gloo"] * 3  # gloo has no servers
    assert {recovery.name_of(plan, strike) for plan in plans for strike in plan.strikes} == {
        "another rank killed, replaced",
        "another rank killed, replaced, --standby",
        "rank 0 killed, replaced",
        "rank 0 killed, replaced, --standby",
        "another rank frozen, fail_after=2, replaced",
        "another rank frozen, fail_after=2, replaced, --standby",
        "another rank killed, one fewer",
        "rank 0 killed, one fewer",
        "a server killed, replaced",
    }
    assert all(max(int(strike.split(":")[2]) for strike in plan.strikes) < recovery.STEPS for plan in plans)


@pytest.mark.parametrize("found", [{}, {"one": 1.0}, {"one": 1.0, "two": 2.0}])
def test_a_job_of_torchrun_that_does_not_recover_once_is_broken(
    found: dict[str, float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recovery, "restart", lambda *_: found)
    parser = argparse.ArgumentParser()
    recovery.add_arguments(parser)
    is_well = recovery.run(parser.parse_args(["--engines", "gpt2", "--torchrun", "1", "--times", "0"]))
    assert is_well == (len(found) == 1)
    assert (f"gpt2, torchrun: {len(found)} recoveries from one loss" in capsys.readouterr().out) != is_well
