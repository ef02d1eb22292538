"""Initial weights that depend only on the model, not on the process's random state or its threads."""

from __future__ import annotations

import math

import torch
from torch import nn

_EMBEDDING_STD = 0.02


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Initialise every matrix and convolution by its fan-in (K. He et al., ICCV 2015), and embeddings as BERT does. Biases are
    0.

    Norms keep their initial ones and zeros. A tied weight is initialised as the embedding.
    """
    generator = torch.Generator().manual_seed(0)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    norms = {id(p) for module in model.modules() if "Norm" in type(module).__name__ for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) in norms:
            continue
        if id(parameter) in tables:
            parameter.normal_(0, _EMBEDDING_STD, generator=generator)
        elif parameter.dim() > 1:
            parameter.normal_(0, math.sqrt(2 / parameter[0].numel()), generator=generator)
        else:
            parameter.zero_()
