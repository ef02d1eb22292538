"""A generative adversarial network that learns to draw the digits, data-parallel.

    commsched run -n 2 -- python examples/gan.py

The lines of commsched are marked: one for each optimizer; without them it is plain PyTorch. After ``dcgan`` of
pytorch/examples: two backward passes before the discriminator's step, and a third that gives it gradients which nobody uses.
"""

from __future__ import annotations

import argparse
import os

import torch
from digits import batches, load
from torch import nn

import commsched.plugins.torch as cs  # line 1

NOISE, WIDTH = 16, 32


def make_generator() -> nn.Module:
    """Noise [images, NOISE, 1, 1] to images [images, 1, 8, 8] in (-1, 1)."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, WIDTH, 4, 1, 0, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(True),
        nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def make_discriminator() -> nn.Module:
    """Images to the probability [images] that they are real."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, 1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(WIDTH, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--steps", type=int, help="end after so many; default: all")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
    torch.manual_seed(0)
    images = load()[0] * 2 - 1
    generator, discriminator = make_generator(), make_discriminator()
    noise_source = torch.Generator().manual_seed(rank)
    criterion = nn.BCELoss()
    generator_optimizer: torch.optim.Optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    discriminator_optimizer: torch.optim.Optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    generator_optimizer = cs.ScheduledOptimizer(generator_optimizer, generator)  # line 2
    discriminator_optimizer = cs.ScheduledOptimizer(discriminator_optimizer, discriminator)  # line 2
    real, fake = torch.ones(args.batch), torch.zeros(args.batch)
    for step, mine in enumerate(batches(len(images), args.epochs, args.batch, rank, world_size)[: args.steps]):
        discriminator.zero_grad()
        loss_real = criterion(discriminator(images[mine]), real)
        loss_real.backward()
        drawn = generator(torch.randn(args.batch, NOISE, 1, 1, generator=noise_source))
        loss_fake = criterion(discriminator(drawn.detach()), fake)
        loss_fake.backward()
        discriminator_optimizer.step()

        generator.zero_grad()
        loss = criterion(discriminator(drawn), real)
        loss.backward()
        generator_optimizer.step()
        print(f"rank {rank} step {step} loss {loss.item():.9g} of D {(loss_real + loss_fake).item():.9g}", flush=True)


if __name__ == "__main__":
    main()
