import gc
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

# Few, so that an operation that holds one while it waits shows. test_processes.py has it once more with 1.
tf.config.threading.set_inter_op_parallelism_threads(int(os.environ.get("COMMSCHED_TEST_INTER_OP", "2")))
tf.config.threading.set_intra_op_parallelism_threads(1)


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
def _float64() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")
    keras.backend.clear_session(free_memory=False)
