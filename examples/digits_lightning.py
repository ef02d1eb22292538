"""A convolutional network on the digits, data-parallel with Lightning.

    python examples/digits_lightning.py  # Lightning starts the second process; or with torchrun or commsched run

The two lines of commsched are marked. Without them this is training with Lightning's "ddp" strategy, with the same result.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from digits import load
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import commsched.plugins.lightning  # noqa: F401  # line 1

EPOCHS, BATCH = 4, 32


class Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, 64, 3, padding=1), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.body(images), labels)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        right = (self.body(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    images, labels, test_images, test_labels = load()
    trainer = pl.Trainer(
        strategy="commsched",  # line 2
        accelerator="cpu",
        devices=2,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
    )
    batches = DataLoader(TensorDataset(images, labels), BATCH, shuffle=True)
    tests = DataLoader(TensorDataset(test_images, test_labels), BATCH)
    trainer.fit(Network(), batches, tests)
    right = trainer.callback_metrics["accuracy"].item()
    print(
        f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps, test accuracy {right:.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
