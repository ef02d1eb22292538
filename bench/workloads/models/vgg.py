"""VGG-16 (K. Simonyan, A. Zisserman, ICLR 2015, configuration D). Most of its bytes are in the last three layers."""

from __future__ import annotations

import torch
from torch import nn

_CONVOLUTIONS = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))  # (channels / width, convolutions) before each pooling


class VGG16(nn.Module):
    """Images [batch, image_channels, image_size, image_size] to logits. The defaults are the full size: 138,357,544 parameters.

    ``width`` is the number of channels of the first stage, ``hidden`` the width of the two fully connected layers. ``smooth``
    replaces ReLU and maximum by GELU and average pooling, so that rounding cannot flip a gradient and trainings can be
    compared."""

    def __init__(
        self,
        classes: int = 1000,
        width: int = 64,
        hidden: int = 4096,
        image_size: int = 224,
        image_channels: int = 3,
        smooth: bool = False,
    ) -> None:
        super().__init__()
        activation: nn.Module = nn.GELU() if smooth else nn.ReLU(inplace=True)
        layers: list[nn.Module] = []
        channels = image_channels
        for multiple, count in _CONVOLUTIONS:
            for _ in range(count):
                layers += [nn.Conv2d(channels, multiple * width, 3, padding=1), activation]
                channels = multiple * width
            layers.append(nn.AvgPool2d(2) if smooth else nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        flat = channels * (image_size // 2 ** len(_CONVOLUTIONS)) ** 2
        self.classifier = nn.Sequential(
            nn.Linear(flat, hidden),
            activation,
            nn.Linear(hidden, hidden),
            activation,
            nn.Linear(hidden, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits
