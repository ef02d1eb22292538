"""Training in real processes, which end without closing anything, and fork meanwhile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mxnet import gluon

from tests import warm
from tests.jobs.job import run_job

from .training import NAG, STEPS, mlp, require_equal, train_alone


def run(out: Path, *arguments: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tests.plugins.mxnet.rank", str(out), *arguments]
    sizes = ("--partition", "200", "--credit", "400")
    return run_job(
        *("-n", "2", "--transport", "ps", *sizes, *options, "--", *command),
        environ={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN": "1"},
        imports=warm.MXNET,
        timeout_seconds=300,
    )


def test_the_parameter_server_equals_plain_training_also_when_workers_of_a_loader_are_forked(tmp_path: Path) -> None:
    """By ScheduledTrainer and over the kvstore, one after another; and the timeline shows what was gained."""
    code, _, err = run(tmp_path / "weights", options=("--trace", str(tmp_path / "trace"), "--rate", "50kbit"))
    assert code == 0, err
    alone = train_alone(lambda: mlp(0, deferred=True), lambda net: gluon.Trainer(net.collect_params(), *NAG), world_size=2)
    for which in ("", ".store"):
        require_equal([dict(np.load(tmp_path / f"weights{which}.{rank}.npz")) for rank in range(2)], alone)
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        require_overlap([event for event in events if event["pid"] == rank and event["ph"] == "X"])


def require_overlap(events: list[dict[str, Any]]) -> None:
    """In at least one step, averages of later layers still arrive when the next forward has gone through its first layer.

    Without overlap there is no such step. A busy machine can hold up the forward of most steps for as long as averages travel.
    """
    averages = [event for event in events if event["cat"] == "reply" and event["args"]["tensors"][0].startswith("net_dense")]
    forwards = [event for event in events if event["cat"] == "forward"]
    assert {event["name"] for event in forwards} == {"net_dense0", "net_dense1", "net_dense2"}
    overlapping = False
    for step in range(STEPS - 1):
        begins = min(event["ts"] for event in averages if event["args"]["step"] == step)
        ends = max(event["ts"] + event["dur"] for event in averages if event["args"]["step"] == step)
        first = [event for event in forwards if event["name"] == "net_dense0" and event["ts"] > begins]
        overlapping |= first[0]["ts"] + first[0]["dur"] < ends
    assert overlapping, (averages, forwards)


def test_a_killed_rank_ends_the_other_with_an_error_that_names_it(tmp_path: Path) -> None:
    code, _, err = run(tmp_path / "weights", "3")
    assert code != 0
    assert "PeerLost: rank 1" in err
    assert not (tmp_path / "weights.store.0.npz").exists()
