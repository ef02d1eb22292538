"""A network on the digits with Hugging Face Accelerate, data-parallel.

    torchrun --standalone --nproc-per-node=2 examples/digits_accelerate.py
    commsched run -n 2 -- python examples/digits_accelerate.py

The one line of commsched is marked; with ``from accelerate import Accelerator`` instead, it is plain Accelerate. Without GPUs,
Accelerate makes use of several processes only when ``cpu=True`` is said.
"""

from __future__ import annotations

import argparse

import torch
from digits import load
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from commsched.plugins.accelerate import Accelerator  # line 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="images per rank and backward")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    images, labels, test_images, test_labels = load()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = DataLoader(TensorDataset(images, labels), args.batch, shuffle=True)
    tests = DataLoader(TensorDataset(test_images, test_labels), 64)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(batches) // 2)
    model, optimizer, batches, tests, scheduler = accelerator.prepare(model, optimizer, batches, tests, scheduler)

    for _ in range(args.epochs):
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    right = 0
    for inputs, targets in tests:
        with torch.inference_mode():
            guesses, truths = accelerator.gather_for_metrics((model(inputs).argmax(1), targets))
        right += int((guesses == truths).sum())
    accelerator.print(f"{accelerator.num_processes} processes, test accuracy {right / len(test_labels):.1%}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
