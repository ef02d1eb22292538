"""ResNet-50 (K. He et al., CVPR 2016), with the stride in the 3x3 convolution, as in most implementations."""

from __future__ import annotations

import torch
from torch import nn

_BLOCKS = (3, 4, 6, 3)  # in each stage
_EXPANSION = 4


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int, activation: nn.Module) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.bn3.weight)  # a block starts as the identity; otherwise gradients explode (P. Goyal et al., 2017)
        self.activation = activation
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.bn1(self.conv1(images)))
        hidden = self.activation(self.bn2(self.conv2(hidden)))
        result: torch.Tensor = self.activation(self.bn3(self.conv3(hidden)) + self.downsample(images))
        return result


class ResNet50(nn.Module):
    """Images [batch, image_channels, height, width] to logits. The defaults are the full size: 25,557,032 parameters.

    ``width`` is the number of channels of the stem. ``smooth`` replaces ReLU and maximum by GELU and average pooling, so that
    rounding cannot flip a gradient and trainings can be compared.
    """

    def __init__(self, classes: int = 1000, width: int = 64, image_channels: int = 3, smooth: bool = False) -> None:
        super().__init__()
        activation: nn.Module = nn.GELU() if smooth else nn.ReLU(inplace=True)
        self.stem = nn.Sequential(
            nn.Conv2d(image_channels, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            activation,
            nn.AvgPool2d(3, 2, padding=1) if smooth else nn.MaxPool2d(3, 2, padding=1),
        )
        channels = width
        stages = []
        for stage, blocks in enumerate(_BLOCKS):
            inner = width * 2**stage
            modules = []
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                modules.append(Bottleneck(channels, inner, stride, activation))
                channels = _EXPANSION * inner
            stages.append(nn.Sequential(*modules))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc(self.pool(self.stages(self.stem(images))).flatten(1))
        return logits
