"""The tuner as in a user's job, in training jobs of its own. Its result is compared with a grid that was measured before."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commsched import CommschedError, Session
from commsched.settings import DEFAULT_BUDGET
from commsched.tuner.job import journal_path
from commsched.tuner.learn import PROFILE_TAKES
from commsched.tuner.meter import LONGEST_WINDOW
from commsched.tuner.online import SETTLE_STEPS, WARM_UP_STEPS
from commsched.tuner.result import Verdict
from commsched.tuner.search_run import LONGER_AT_MOST
from commsched.tuner.stats import MAX_PAIRS, STATED_PAIRS

from ..harness.job import Job, run_job
from ..harness.measure import TOLERATED_DIFFERENCE
from ..harness.processes import JobFailed
from .case import Case
from .grid import Row, surface_of

#: Steps between the ranks' checks whether tuning has ended.
_ASK_STEPS = 10
#: Windows of a tuning run that does not end early: its trials, the pairs that decide, and the pairs that state the gain.
_MAX_WINDOWS = (DEFAULT_BUDGET.trials or 0) + 2 * (MAX_PAIRS + STATED_PAIRS)
_WINDOW_STEPS = 10
#: Steps before the first window.
_BEFOREHAND_STEPS = WARM_UP_STEPS + PROFILE_TAKES
#: Most steps of tuning if steps vary little.
STEADY_STEPS = _BEFOREHAND_STEPS + _MAX_WINDOWS * (SETTLE_STEPS + _WINDOW_STEPS)
#: Most steps of tuning if steps vary much. Windows are then longer, and have some steps more that do not count.
_MAX_STEPS = _BEFOREHAND_STEPS + _MAX_WINDOWS * (SETTLE_STEPS + round(LONGEST_WINDOW * LONGER_AT_MOST * _WINDOW_STEPS))
_START_SECONDS = 300.0
_PATIENCE = 2.0


def live_rows(case: Case, grid: Row, tune_by: Sequence[str], runs: int, budget: str = "1") -> list[Row]:
    """One row for each searcher and run. For ``grid`` see ``grid.measure``.

    Args:
        budget: a value of the setting ``tune``.

    Raises:
        JobFailed: a job failed or took too long, or weights are not those of plain averaging.
    """
    return [_live(case, grid, name, run, budget) for name in tune_by for run in range(runs)]


def _live(case: Case, grid: Row, tune_by: str, run: int, budget: str) -> Row:
    surface = surface_of(grid)
    with tempfile.TemporaryDirectory(prefix="commsched-tune-") as directory:
        out = str(Path(directory, "tuned.toml"))
        settings = {"transport": case.transport, "tune": budget, "tune_by": tune_by, "tune_out": out}
        slowest = max(surface.seconds.values())
        job = Job(
            case.workers,
            0,
            case.bandwidth,
            settings,
            _START_SECONDS + _PATIENCE * _MAX_STEPS * slowest,
            mpi=case.transport == "mpi",
            auto_sizes=True,
        )
        workload = {"kind": "emulated", "profile": case.scaling.profile.to_record()}
        outcome = run_job(job, __name__, {"workload": workload, "journal": str(journal_path(out))})
    difference = max(rank["max_difference"] for rank in outcome.by_rank)
    if not difference <= TOLERATED_DIFFERENCE:
        raise JobFailed(f"{case}: weights differ from plain averaging by {difference:.2g} of the change that training made")
    record = outcome.by_rank[-1]["verdict"]
    return {
        "kind": "live",
        "title": str(case),
        **{key: grid[key] for key in ("model", "workers", "bandwidth_bps", "emulated", "transport")},
        "link": outcome.link,
        "searcher": tune_by,
        "run": run,
        "verdict": record,
        "regret": surface.regret(Verdict.from_record(record).kept),
        "max_difference": difference,
    }


# --- in each rank's process ---


def rank_main(session: Session, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train until tuning has ended. Returns ``verdict``, on the last rank, and the difference of the weights from plain
    averaging."""
    import torch

    import commsched.plugins.torch as cs

    from ..harness.reference import LEARNING_RATE, largest_difference, plain_averaging, weights_of
    from ..workloads import make_workload

    torch.set_num_threads(1)
    workload = make_workload(arguments["workload"], session.world_size)
    model = workload.make_model()
    initial = weights_of(model)
    optimizer = cs.ScheduledOptimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), model, session=session)
    # Rank 0 does not read the file, because it writes it: closing the file there a second time would release its lock.
    reads = session.rank == session.world_size - 1
    verdict = None
    for step in range(_MAX_STEPS):
        optimizer.zero_grad()
        workload.loss(model, step, session.rank).backward()
        optimizer.step()
        if step % _ASK_STEPS == _ASK_STEPS - 1:
            verdict = _verdict(Path(arguments["journal"])) if reads else None
            if any(session.gather(verdict is not None)):
                optimizer.synchronize()
                wanted = plain_averaging(workload, step + 1, session.world_size)
                return {"verdict": verdict, "max_difference": largest_difference(model, wanted, initial)}
    raise CommschedError(f"tuning did not end after {_MAX_STEPS} steps: it is slow, or it failed; see the log of rank 0")


def _verdict(journal: Path) -> dict[str, Any] | None:
    """The verdict of tuning; None if it has not ended."""
    if not journal.exists():
        return None
    whole = journal.read_text().rpartition("\n")[0].splitlines()
    records = [json.loads(line) for line in whole[-1:]]
    return next((record for record in records if record["phase"] == "verdict"), None)
