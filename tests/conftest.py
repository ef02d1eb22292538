"""For all tests, and before any of them imports numpy or PyTorch."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# The same examples every time, and no verdict that depends on how busy the machine is.
settings.register_profile("commsched", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("commsched")

# Ranks are threads and jobs, models are small, and tests run side by side: more threads would wait for each other by spinning,
# which took two thirds of the CPU time of tests with PyTorch. Processes that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What test modules import stays: a million objects that the garbage collector need not look through, neither now nor
    again and again later. Nor need what asks it for every DistributedDataParallel there is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _what_is_there_stays() -> None:
    """So does what the modules before have imported, such as the compiler of PyTorch."""
    gc.collect()
    gc.freeze()
