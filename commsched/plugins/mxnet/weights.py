"""Comparison of the weights between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import mxnet as mx
import numpy as np

import commsched

from ..common.weights_check import WeightsCheck, digest_of


class ComparedWeights:
    """Compares digests of the weights after a step between ranks.

    The digests are sent once it is known that the ranks did the same up to that step. An error can then name the different
    action first, and not the different weights that it caused.

    Args:
        what: names the optimizer in errors. Unique in the session.
        names, nbytes: name and size in bytes of each weight.
    """

    def __init__(self, session: commsched.Session, what: str, names: Sequence[str], nbytes: Sequence[int]) -> None:
        self._check = WeightsCheck(session, names, nbytes, f"weights of {what}")
        self._digests: dict[int, int] = {}

    def take(self, step: int, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Compute the digests of the weights after ``step``, if they are to be compared in this step.

        Waits for the updates of the part of the weights that is compared.

        Args:
            arrays: all weights.

        Raises:
            MXNetError: an operation that computes one of the weights failed.
        """
        if self._check.begin(step):
            for index, array in enumerate(arrays):
                part = self._check.wanted(index)
                if part is not None:
                    size = np.dtype(array.dtype).itemsize
                    values = array.as_nd_ndarray().reshape((-1,))[part[0] // size : part[1] // size].asnumpy()
                    self._digests[index] = digest_of(values.view(np.uint8).data)

    def compare(self) -> None:
        """Send the digests that were taken last, unless they were sent before.

        Raises:
            CommschedError: the job failed, or the session is closed.
        """
        digests, self._digests = self._digests, {}
        for index, digest in digests.items():
            self._check.add(index, digest)
