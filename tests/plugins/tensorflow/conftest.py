import gc
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

from commsched.plugins.tensorflow import guard as earlier

# Few, so that an operation that holds one while it waits shows. test_processes.py has it once more with 1.
tf.config.threading.set_inter_op_parallelism_threads(2)
tf.config.threading.set_intra_op_parallelism_threads(1)
# Optimizing graphs takes a good part of the time that these tests do: test_processes.py trains with optimized ones.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thaws: looks for functions among all objects that there are")


@pytest.fixture(autouse=True, scope="module")
def _collect_once() -> Iterator[None]:
    """Each test traces graphs of many objects, which live to its end: to look for garbage meanwhile took much of the time."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _frozen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was there before these tests stays out of the search for functions that were traced before."""
    thaws = request.node.get_closest_marker("thaws") is not None
    if not thaws:
        monkeypatch.setattr(earlier, "unfreeze_objects", lambda: None)
    yield
    if thaws:
        gc.freeze()


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")
    keras.backend.clear_session(free_memory=False)
