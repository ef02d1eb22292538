"""The code blocks of docs/tensorflow.md run, with one rank."""

from __future__ import annotations

import runpy
from pathlib import Path

import keras
import pytest

import commsched
from tests.code_blocks import python_of


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # Keras's, for every dataset that it is given
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("COMMSCHED_LOG", "warning")
    names: dict[str, object] = {}
    try:
        exec(python_of("tensorflow.md", "# line 2").replace("epochs=5", "epochs=1"), names)
        assert capsys.readouterr().out.startswith("rank 0 loss ")
        logs = python_of("tensorflow.md", "AverageLogs()").replace("dataset, ", "dataset, verbose=0, ")
        exec(logs, {**names, "dataset": names["mine"], "gan": names["model"]})
        (tmp_path / "step.py").write_text(python_of("tensorflow.md", "apply_averages"))  # TensorFlow reads it when it traces
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        by_hand = runpy.run_path(str(tmp_path / "step.py"), {**names, "loss_function": loss_function})
        before = by_hand["optimizer"].iterations.numpy()
        for batch in names["mine"].take(3):  # type: ignore[attr-defined]
            by_hand["train_step"](*batch)
        assert by_hand["optimizer"].iterations.numpy() == before + 3
    finally:
        commsched.shutdown()
