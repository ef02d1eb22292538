"""The code blocks of docs/tensorflow.md run, with one rank."""

from __future__ import annotations

import pytest

import commsched
from tests.code_blocks import python_of


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed")  # Keras's, for every dataset that it is given
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMMSCHED_LOG", "warning")
    names: dict[str, object] = {}
    try:
        exec(python_of("tensorflow.md", "# line 2").replace("epochs=5", "epochs=1"), names)
        assert capsys.readouterr().out.startswith("rank 0 loss ")
        logs = python_of("tensorflow.md", "AverageLogs()").replace("dataset, ", "dataset, verbose=0, ")
        exec(logs, {**names, "dataset": names["mine"], "gan": names["model"]})
    finally:
        commsched.shutdown()
