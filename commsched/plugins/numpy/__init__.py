"""A small numpy engine and its plugin: the reference implementation of a plugin."""

from .engine import SGD, Layer, Linear, Network, ReLU, softmax_cross_entropy
from .plugin import ScheduledOptimizer

__all__ = ["ScheduledOptimizer", "Network", "Layer", "Linear", "ReLU", "SGD", "softmax_cross_entropy"]
