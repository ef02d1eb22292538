"""Lightning's Trainer with ``strategy="commsched"``, against the same with "ddp", in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import commsched
from commsched.core.errors import ConfigError
from commsched.core.world import World
from commsched.session.local import local_sessions
from tests import warm
from tests.jobs.job import ROOT, clean_environ

#: With two ranks there is one order to sum in, so nothing differs from DDP, not even by rounding.
COMPARED = ("plain", "clipped", "mixed", "gan", "toggled_gan", "resumed", "averaged", "disabled", "own_buffers")
CLIPPED = ("clipped", "mixed")
FAILING = ("no_optimizer", "open_already", "raising")

RANK = "tests.plugins.lightning_rank"
LAUNCHERS = {
    "Lightning": ["-m", RANK],  # starts rank 1 itself
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", RANK],
}


def run(*arguments: str, timeout_seconds: float = 500.0) -> subprocess.CompletedProcess[str]:
    """A Python process, which ends with all that it started."""
    environ = clean_environ(GLOO_SOCKET_IFNAME="lo")  # else gloo looks the host's name up
    process = warm.Popen(
        [sys.executable, *arguments],
        imports=warm.LIGHTNING if "-m" in arguments else (),  # else it is about what is imported
        nested=True,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate()


def train(launcher: str, out: Path, *cases: str) -> list[dict[str, Any]]:
    """Each rank's results."""
    done = run(*LAUNCHERS[launcher], str(out), *cases)
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{out}.{rank}") for rank in range(2)]


def require_equal(results: list[dict[str, Any]], case: str) -> None:
    ours, theirs = ([result[case][strategy] for result in results] for strategy in ("commsched", "ddp"))
    for rank in range(2):
        for name, expected in theirs[rank]["state"].items():
            # The norm is summed in another order than DDP's, so it may round otherwise.
            rounding = {"rtol": 1e-5, "atol": 1e-7} if case in CLIPPED else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(ours[rank]["state"][name], expected, **rounding, msg=lambda m, n=name: f"'{n}': {m}")
            if "running" not in name:  # batch statistics are those of each rank, until rank 0's are sent
                assert torch.equal(ours[rank]["state"][name], ours[0]["state"][name]), f"'{name}' differs between the ranks"
        assert ours[rank]["seen"] == theirs[rank]["seen"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All cases, one after the other in the same processes: each opens a session and closes it."""
    return train("Lightning", tmp_path_factory.mktemp("lightning") / "out", *COMPARED, *FAILING)


@pytest.mark.parametrize("case", COMPARED)
def test_it_equals_ddp(case: str, results: list[dict[str, Any]]) -> None:
    require_equal(results, case)
    for result in results:
        wrapped = set(result[case]["commsched"]["optimizers"])
        assert (wrapped == {"ScheduledOptimizer"}) == (case != "disabled")


def test_the_cases_train(results: list[dict[str, Any]]) -> None:
    """Rank 1 began with other weights, so equal ones are not those of the beginning."""
    for case in COMPARED:
        assert results[0][case]["commsched"]["seen"]["step"] >= 6
    seen = results[0]["plain"]["commsched"]["seen"]
    assert seen["test_loss"] != seen["best"]
    assert "lr-SGD-momentum" in seen["rates"][0]
    assert seen["states"] > 0


def test_torchrun(tmp_path: Path) -> None:
    require_equal(train("torchrun", tmp_path / "out", "toggled_gan"), "toggled_gan")


def test_ranks_that_are_not_those_of_commsched_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Lightning starts ranks of its own in each rank of ``commsched run``."""
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(f"COMMSCHED_{name}", str(value))
    message = (
        "commsched run says that this is rank 1 of 2, but Lightning that it is rank 0 of 4; let one of them start the ranks"
    )
    with pytest.raises(ConfigError, match=message):
        commsched.init(world=World(0, 4, 0, 4, "Lightning"))


def test_no_optimizer_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        # A rank that is later may hear of the other's refusal before it refuses by itself.
        assert "UnsupportedError: configure_optimizers returned no optimizer" in result["no_optimizer"]


def test_a_session_of_the_script_is_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["open_already"] == (
            "ConfigError: commsched is already initialised; give world, rendezvous at the first call of init"
        )


def test_an_exception_on_one_rank_is_told_to_the_other(results: list[dict[str, Any]]) -> None:
    assert results[0]["raising"] == "TransportError: rank 1 ended: ArithmeticError: a bad batch"
    assert results[1]["raising"] == "ArithmeticError: a bad batch"


def test_buffers_that_a_rank_which_is_gone_cannot_get_are_no_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections break before the job knows why, and it is the why that is raised."""
    from commsched.plugins.lightning import ScheduledStrategy

    def broken(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "_broadcast_coalesced", broken)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=object()))
    sessions = local_sessions(2)
    strategy = ScheduledStrategy()
    strategy._session = sessions[0]
    strategy._lightning_module = torch.nn.BatchNorm1d(2)
    late = threading.Timer(0.2, sessions[1].abort, ["ArithmeticError: a bad batch"])
    late.start()
    with pytest.raises(commsched.TransportError, match=r"^rank 1 ended: ArithmeticError: a bad batch$"):
        strategy._share_buffers()
    late.join()
    sessions[0].abort("over")


ALONE = """
import os
import sys
import torch
import pytorch_lightning as pl
from commsched.core.errors import ConfigError
from commsched.plugins.lightning import ScheduledStrategy

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1.0)

model = Model()
before = model.layer.bias.item()
arguments = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = pl.Trainer(strategy="commsched", accelerator="cpu", devices=1, max_steps=3, **arguments)
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 2)))
assert abs(before - model.layer.bias.item() - 3) < 1e-5
assert "lightning.pytorch" not in sys.modules
try:
    ScheduledStrategy(find_unused_parameters=True)
except ConfigError as error:
    print(error)
os.environ |= {"COMMSCHED_RANK": "1", "COMMSCHED_WORLD_SIZE": "2"}
try:
    pl.Trainer(strategy="commsched", accelerator="cpu", devices=1, **arguments).fit(
        model, torch.utils.data.DataLoader(torch.ones(4, 2))
    )
except ConfigError as error:
    print(error)
"""


def test_one_rank_and_the_package_pytorch_lightning() -> None:
    done = run("-c", ALONE)
    assert done.returncode == 0, done.stderr
    assert "find_unused_parameters is not a setting" in done.stdout
    assert "commsched run started 2 ranks, but Lightning's Trainer(devices=..., num_nodes=...) makes 1" in done.stdout


@pytest.mark.parametrize("missing", [["lightning", "pytorch_lightning"], ["lightning", "pytorch_lightning", "torch"]])
def test_without_lightning_it_says_what_to_install(missing: list[str]) -> None:
    """As if it were not installed: an import of what stands as None in ``sys.modules`` fails."""
    text = f"import sys; sys.modules |= dict.fromkeys({missing}); import commsched.plugins.lightning"
    done = run("-c", text)
    assert 'ModuleNotFoundError: this plugin needs Lightning: pip install "commsched[lightning]"' in done.stderr
