"""Trainings with Lightning, one after the other: lightning_rank.py OUT CASE... Started once, or once per rank.

Saves what each case gave on this rank as OUT.<rank>, by the name of the case: for each strategy, the model's state, metrics,
and what else the case looks at.
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commsched
from commsched.core.world import World
from commsched.plugins.lightning import ScheduledStrategy

BATCHES = 6  # per rank and epoch

Result = dict[str, Any]
Fit = Callable[[str, Path], Result]  # of the strategy's name, and a directory


def loader(seed: int = 1) -> DataLoader[Any]:
    """Rows that are dealt out to the ranks by Lightning's sampler."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2 * BATCHES * 4, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (len(inputs),), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=4)


class Classifier(LightningModule):
    """Begins with other weights on each rank."""

    def __init__(self, optimizer: str = "SGD", interval: str = "step") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.optimizer_name = optimizer
        self.interval = interval
        self.states_seen = 0

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.body(batch[0]).double(), batch[1])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.states_seen += len(self.optimizers().state_dict()["state"])  # type: ignore[union-attr]
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "SGD":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, nesterov=True)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class Gan(LightningModule):
    """Two optimizers, by hand. ``toggles``: whether each sees the other's parameters frozen."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    @contextmanager
    def toggled(self, optimizer: Any) -> Iterator[None]:
        if self.toggles:
            self.toggle_optimizer(optimizer)
        yield
        if self.toggles:
            self.untoggle_optimizer(optimizer)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        made = self.generator(batch[0][:, :3])
        with self.toggled(of_generator):
            of_generator.zero_grad()
            self.manual_backward(nn.functional.softplus(-self.critic(made)).mean())
            of_generator.step()
        with self.toggled(of_critic):
            of_critic.zero_grad()
            apart = self.critic(made.detach()) - self.critic(batch[0])
            self.manual_backward(nn.functional.softplus(apart).mean())
            of_critic.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.generator, self.critic)]


def make_trainer(strategy: Any, directory: Path, **arguments: Any) -> Trainer:
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    if "callbacks" not in arguments:
        quiet["enable_checkpointing"] = False
    arguments = {"max_epochs": 2, "logger": False, **quiet, **arguments}
    return Trainer(strategy=strategy, accelerator="cpu", devices=2, default_root_dir=directory, **arguments)


def result_of(trainer: Trainer, model: LightningModule, **seen: Any) -> Result:
    """``seen``: what must be equal to what DDP shows, besides the model's state."""
    seen |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    optimizers = [type(optimizer).__name__ for optimizer in trainer.optimizers]
    return {"state": dict(model.state_dict()), "optimizers": optimizers, "seen": {"step": trainer.global_step, **seen}}


def seeded(make: Callable[..., LightningModule], *arguments: Any) -> LightningModule:
    torch.manual_seed(5 + rank())
    return make(*arguments)


def rank() -> int:
    from lightning.pytorch.utilities import rank_zero_only

    return int(rank_zero_only.rank)


# --- cases ---


def plain(strategy: str, directory: Path) -> Result:
    """Validation, a test afterwards, a scheduler, the best checkpoint, the learning rate and early stopping."""
    best = ModelCheckpoint(directory / "best", monitor="val_loss")
    callbacks = [best, EarlyStopping("val_loss", patience=9), LearningRateMonitor("step", log_momentum=True)]
    logger = CSVLogger(directory)
    trainer = make_trainer(strategy, directory, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    model = seeded(Classifier)
    trainer.fit(model, loader(), loader(2))
    assert best.best_model_score is not None
    seen = {"best": best.best_model_score.item(), "states": model.states_seen}
    seen["rates"] = rates(Path(logger.log_dir, "metrics.csv"), strategy) if rank() == 0 else []
    trainer.test(model, loader(3), verbose=False)
    return result_of(trainer, model, **seen)


def rates(file: Path, strategy: str) -> list[dict[str, str]]:
    """What the logger has of Lightning's own metrics. It also has commsched's, where that averages."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert any(row.get("commsched/step_seconds") for row in rows) == (strategy == "commsched")
    own = [{name: value for name, value in row.items() if value and not name.startswith("commsched/")} for row in rows]
    return [row for row in own if row.keys() - {"step", "epoch"}]


def clipped(strategy: str, directory: Path) -> Result:
    trainer = make_trainer(strategy, directory, gradient_clip_val=0.05, accumulate_grad_batches=2)
    model = seeded(Classifier, "AdamW")
    trainer.fit(model, loader())
    return result_of(trainer, model)


def mixed(strategy: str, directory: Path) -> Result:
    trainer = make_trainer(strategy, directory, precision="bf16-mixed", gradient_clip_val=1.0)
    model = seeded(Classifier)
    model.float()
    trainer.fit(model, DataLoader([(row.float(), label) for row, label in loader().dataset], batch_size=4))
    return result_of(trainer, model)


def gan(strategy: str, directory: Path, toggles: bool = False) -> Result:
    trainer = make_trainer(strategy if strategy == "commsched" else "ddp_find_unused_parameters_true", directory)
    model = seeded(Gan, toggles)
    trainer.fit(model, loader())
    return result_of(trainer, model)


def toggled_gan(strategy: str, directory: Path) -> Result:
    return gan(strategy, directory, toggles=True)


def resumed(strategy: str, directory: Path) -> Result:
    """An epoch, a checkpoint, and the second epoch of what was read from it."""
    trainer = make_trainer(strategy, directory, max_epochs=1)
    trainer.fit(seeded(Classifier, "AdamW"), loader())
    trainer.save_checkpoint(directory / "one.ckpt")
    trainer = make_trainer(strategy, directory)
    model = seeded(Classifier, "AdamW")
    trainer.fit(model, loader(), ckpt_path=directory / "one.ckpt")
    return result_of(trainer, model)


def averaged(strategy: str, directory: Path) -> Result:
    """Stochastic weight averaging: a scheduler that is exchanged, weights read between steps, an epoch without updates."""
    swa = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
    trainer = make_trainer(strategy, directory, max_epochs=3, callbacks=[swa], enable_checkpointing=False)
    model = seeded(Classifier, "SGD", "epoch")
    trainer.fit(model, loader())
    return result_of(trainer, model)


def disabled(strategy: str, directory: Path) -> Result:
    return clipped(ScheduledStrategy(disable=True) if strategy == "commsched" else strategy, directory)


def own_buffers(strategy: str, directory: Path) -> Result:
    given = ScheduledStrategy if strategy == "commsched" else DDPStrategy
    trainer = make_trainer(given(broadcast_buffers=False), directory)
    model = seeded(Classifier)
    trainer.fit(model, loader(), loader(2))
    return result_of(trainer, model)


class NoOptimizer(Classifier):
    def configure_optimizers(self) -> None:
        return None


class OpenAlready(Classifier):
    def configure_model(self) -> None:
        world = World(self.global_rank, 2, self.global_rank, 2)
        commsched.init(world=world, rendezvous=str(Path(self.trainer.default_root_dir, "rendezvous")))


class Raising(Classifier):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == 3 and self.global_rank == 1:
            raise ArithmeticError("a bad batch")
        return super().training_step(batch, index)


def error_of(make: type[LightningModule], directory: Path) -> str:
    trainer = make_trainer("commsched", directory)
    try:
        trainer.fit(seeded(make), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        commsched.shutdown()
    return "no error"


COMPARED: dict[str, Fit] = {
    case.__name__: case for case in (plain, clipped, mixed, gan, toggled_gan, resumed, averaged, disabled, own_buffers)
}
FAILING: dict[str, type[LightningModule]] = {
    "no_optimizer": NoOptimizer,
    "open_already": OpenAlready,
    "raising": Raising,
}


def main() -> None:
    out, *cases = sys.argv[1:]
    warnings.filterwarnings("error", category=UserWarning)  # Lightning itself uses what PyTorch deprecates: a FutureWarning
    warnings.filterwarnings("ignore", category=PossibleUserWarning)  # Lightning's advice: more workers, and the like
    warnings.filterwarnings("ignore", message="`LightningModule.configure_optimizers` returned `None`")  # a case
    results: dict[str, Any] = {}
    for case in cases:
        directory = Path(f"{out}.{case}")  # one that both ranks know
        if case in FAILING:
            results[case] = error_of(FAILING[case], directory)
        else:
            results[case] = {strategy: COMPARED[case](strategy, directory / strategy) for strategy in ("commsched", "ddp")}
    torch.save(results, f"{out}.{rank()}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
