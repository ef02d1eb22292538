"""A small reference engine: fully connected networks, layer by layer, in numpy. It does not depend on commsched.

The engine has everything that a scheduler needs, in its simplest form: layers that run in a known order, one gradient array
per parameter that backward writes into, hooks around each layer's work, and an optimizer that can update one layer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

#: A context manager that is entered with a layer's index before the layer's work and left after it.
LayerHook = Callable[[int], AbstractContextManager[object]]


class Layer(Protocol):
    """One layer of a network. ``backward`` writes the gradient of ``parameters[name]`` into the array ``gradients[name]``.

    To have gradients written elsewhere, replace that array by another one of the same shape and dtype.
    """

    parameters: dict[str, NDArray[Any]]
    gradients: dict[str, NDArray[Any]]

    def forward(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """Return the outputs for ``inputs`` of shape [batch, features]. Keeps the values that ``backward`` needs."""

    def backward(self, output_gradient: NDArray[Any]) -> NDArray[Any]:
        """Write the gradients of the parameters. Return the gradient of the inputs of the last ``forward``."""


class Linear:
    """``outputs = inputs @ weight + bias``; ``dtype`` is float64 or float32."""

    def __init__(self, inputs: int, outputs: int, rng: np.random.Generator, dtype: DTypeLike = np.float64) -> None:
        weight = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)  # He et al., 2015: fits ReLU
        self.parameters = {"weight": weight.astype(dtype), "bias": np.zeros(outputs, dtype)}
        self.gradients = {name: np.zeros_like(parameter) for name, parameter in self.parameters.items()}

    def forward(self, inputs: NDArray[Any]) -> NDArray[Any]:
        self._inputs = inputs
        outputs: NDArray[Any] = inputs @ self.parameters["weight"] + self.parameters["bias"]
        return outputs

    def backward(self, output_gradient: NDArray[Any]) -> NDArray[Any]:
        np.matmul(self._inputs.T, output_gradient, out=self.gradients["weight"])
        np.sum(output_gradient, axis=0, out=self.gradients["bias"])
        input_gradient: NDArray[Any] = output_gradient @ self.parameters["weight"].T
        return input_gradient


class ReLU:
    """``outputs = max(inputs, 0)``."""

    def __init__(self) -> None:
        self.parameters: dict[str, NDArray[Any]] = {}
        self.gradients: dict[str, NDArray[Any]] = {}

    def forward(self, inputs: NDArray[Any]) -> NDArray[Any]:
        self._positive = inputs > 0
        return inputs * self._positive

    def backward(self, output_gradient: NDArray[Any]) -> NDArray[Any]:
        return output_gradient * self._positive


class Network:
    """A sequence of layers. Replace ``around_forward`` and ``around_backward`` to run code around each layer."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self.layers = tuple(layers)
        self.around_forward: LayerHook = nullcontext
        self.around_backward: LayerHook = nullcontext

    def forward(self, inputs: NDArray[Any]) -> NDArray[Any]:
        for index, layer in enumerate(self.layers):
            with self.around_forward(index):
                inputs = layer.forward(inputs)
        return inputs

    def backward(self, output_gradient: NDArray[Any]) -> None:
        """Write the gradients of all layers, last layer first. Call it after ``forward``."""
        for index in reversed(range(len(self.layers))):
            with self.around_backward(index):
                output_gradient = self.layers[index].backward(output_gradient)


class SGD:
    """Stochastic gradient descent with momentum. ``learning_rate`` and ``momentum`` may be changed between steps."""

    def __init__(self, network: Network, learning_rate: float, momentum: float = 0.0) -> None:
        self.network = network
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.velocities = [
            {name: np.zeros_like(parameter) for name, parameter in layer.parameters.items()} for layer in network.layers
        ]

    def step(self) -> None:
        """Update every layer with its gradients."""
        for index in range(len(self.network.layers)):
            self.update(index)

    def update(self, index: int) -> None:
        """Update exactly one layer."""
        layer = self.network.layers[index]
        for name, velocity in self.velocities[index].items():
            velocity *= self.momentum
            velocity += layer.gradients[name]
            layer.parameters[name] -= self.learning_rate * velocity


def softmax_cross_entropy(logits: NDArray[Any], labels: NDArray[Any]) -> tuple[float, NDArray[Any]]:
    """Return the mean loss of a batch and its gradient. ``logits`` are [batch, classes], ``labels`` are integers [batch]."""
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    gradient = np.exp(log_probabilities)
    gradient[rows, labels] -= 1
    gradient /= len(labels)
    return -float(log_probabilities[rows, labels].mean()), gradient
