"""The weights of elastic jobs whose ranks run ``elastic_rank.py``, as they must be: computed anew from the same batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commsched.plugins.numpy import softmax_cross_entropy
from tests.jobs.elastic_rank import batch, digest, make_optimizer


def replayed(sizes: Sequence[int]) -> str:
    """The digest of the weights after a step for each of ``sizes``, which are numbers of ranks, in plain numpy: no session, no
    network. Transports that add up the gradients in the order of their ranks come to the same bits."""
    optimizer = make_optimizer()
    layers = optimizer.network.layers
    for step, size in enumerate(sizes):
        sums = [{name: np.zeros_like(values) for name, values in layer.gradients.items()} for layer in layers]
        for rank in range(size):
            inputs, labels = batch(step, rank)
            _, gradient = softmax_cross_entropy(optimizer.network.forward(inputs), labels)
            optimizer.network.backward(gradient)
            for sum_of, layer in zip(sums, layers, strict=True):
                for name, values in layer.gradients.items():
                    sum_of[name] = sum_of[name] + values
        for sum_of, layer in zip(sums, layers, strict=True):
            for name, values in layer.gradients.items():
                values[...] = sum_of[name] / values.dtype.type(size)
        optimizer.step()
    return digest(optimizer.network)
