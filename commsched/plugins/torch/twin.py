"""Twins: tensor objects that outstanding updates work on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .marked import marked_twin


def alias(tensor: torch.Tensor, own_class: type) -> Any:
    """Return another tensor object that shares the memory, the attributes and the version counter of ``tensor``. Its class is
    ``own_class``."""
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        other: Any = tensor.detach()
        if type(other) is torch.Tensor:
            other.requires_grad_(tensor.requires_grad)
            other.__class__ = own_class
            other.__dict__ = tensor.__dict__
        return other


class Twin:
    """Another tensor object for one parameter: with its class, memory and attributes, but with a separate ``.grad``.

    The update of a parameter may run in any thread that reads it, so the user's optimizer works on twins. Changes that other
    threads make to ``parameter.grad`` meanwhile do not affect the update, and those threads do not see the ``.grad`` of the
    update.
    """

    __slots__ = ("address", "average", "dtype", "keeps_average", "marked", "plain", "shape", "stride", "tensor", "version")

    def __init__(self, parameter: torch.Tensor, own_class: type) -> None:
        self.tensor = alias(parameter, own_class)
        self.version = 0  # the parameter's version when the update became outstanding
        self.average: torch.Tensor | None = None  # kept result of another_of(), which takes time to make
        self.keeps_average = False  # ``average`` is in ``.grad`` of the tensor between updates
        self._look()

    def _look(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self.plain = self.tensor.detach()  # a tensor without the parameter's attributes
        self.marked = marked_twin(self.plain)
        self.address = self.plain.data_ptr()
        self.shape, self.stride, self.dtype = self.plain.shape, self.plain.stride(), self.plain.dtype

    def follow(self, parameter: torch.Tensor) -> bool:
        """Follow ``parameter`` if the user has given it other memory, and return whether that is so. The parameter must be
        neither guarded nor marked."""
        if (
            parameter.data_ptr() == self.address
            and parameter.shape == self.shape
            and parameter.stride() == self.stride
            and parameter.dtype == self.dtype
        ):
            return False
        self.tensor.data = parameter
        self.tensor.grad, self.keeps_average = None, False
        self._look()
        return True

    def take_values(self) -> bool:
        """Copy the values to the parameter's memory if the optimizer has given the twin other memory, and use that memory
        again. Return whether the values fit. The calling thread must be within ``unguarded`` and ``no_grad``."""
        twin = self.tensor
        if twin.shape != self.shape or twin.dtype != self.dtype:
            return False
        if twin.data_ptr() != self.address or twin.stride() != self.stride:
            self.plain.copy_(twin.clone())
            twin.data = self.plain
        return True

    def another_of(self, average: torch.Tensor) -> torch.Tensor:
        """Return another tensor object in the memory of the parameter's ``average``; the same object each time."""
        if self.average is None:
            self.average = average.detach()
        return self.average

    def has_moved(self, gradient: torch.Tensor) -> bool:
        """Whether ``gradient`` is the object of :meth:`another_of`, called when it lies in other memory than the average.

        If so, the optimizer has given it other memory through ``.data``, and the next update gets a new object.
        """
        if gradient is not self.average:
            return False
        self.average = None
        return True


def increment_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Increment the version of each tensor, as an in-place change does, so that graphs that saved it raise an error."""
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # before PyTorch 2.6: one by one
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
