"""The numpy engine with cupy's arrays."""

from __future__ import annotations

import pytest

from commsched.testing import check_plugin

from .test_numpy_on_device import OnDevice

cupy = pytest.importorskip("cupy")


def gpus() -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@pytest.mark.gpu
@pytest.mark.skipif(gpus() == 0, reason="needs a GPU")
def test_training_equals_training_alone() -> None:
    check_plugin(OnDevice(1e-9, cuda=True))
