"""For all tests, and before any of them imports numpy or PyTorch."""

import gc
import os
import threading
from collections.abc import Generator, Iterator
from time import monotonic

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


#: Time in which the cores of a module's tests must end.
_END_SECONDS = 20.0


@pytest.fixture(autouse=True, scope="module")
def _no_core_is_left_open() -> Iterator[None]:
    """Tests of other modules would find its thread: some count threads."""
    before = set(threading.enumerate())
    yield
    deadline = monotonic() + _END_SECONDS
    ours = [each for each in threading.enumerate() if each not in before and each.name == "commsched-dispatch"]
    for each in ours:
        each.join(max(0.0, deadline - monotonic()))
    assert not [each.name for each in ours if each.is_alive()]
