"""The code blocks of docs/tensorflow.md run, with one rank."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import commsched
from tests.code_blocks import python_of


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # Keras's, for every dataset that it is given
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMSCHED_LOG", "warning")
    data = tf.data.Dataset.from_tensors((np.ones((4, 64), np.float32), np.ones(4)))
    script = python_of("tensorflow.md", "# line 2").replace("loss=...", "loss='sparse_categorical_crossentropy'")
    names = {"keras": keras, "dataset": data}
    try:
        exec(script.replace("rank), ...)", "rank), verbose=0)"), names)
        logs = python_of("tensorflow.md", "AverageLogs()").replace("dataset, ", "dataset, verbose=0, ")
        exec(logs, {**names, "gan": names["model"]})
    finally:
        commsched.shutdown()
