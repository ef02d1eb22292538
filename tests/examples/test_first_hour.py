"""The script of docs/first_hour.md does what it says there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.jobs.job import ROOT, run_job

SIZES = re.compile(r"(\d[\d.]*) ([KM])B")
PAGE = (ROOT / "docs" / "first_hour.md").read_text()


def test_the_first_script(tmp_path: Path) -> None:
    script, line = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL), re.search(r"^commsched: .*\n", PAGE, re.MULTILINE)
    assert script is not None
    assert line is not None
    path = tmp_path / "train.py"
    path.write_text(script[1].replace("torch.randn(2048,", "torch.randn(256,"))  # an eighth of its steps
    code, out, err = run_job("-n", "2", "--", sys.executable, str(path), imports=())
    # The sizes chosen depend on the machine's interface and processors; all else of the line is the page's.
    said, written = (re.sub(r"\d[\d.]* [KM]B at first", "SIZE at first", text) for text in (err, line[0]))
    assert (code, said) == (0, written)
    for text in (err, line[0]):  # a credit has room for whole partitions, of which the model has several
        gradients, partition, credit = (float(number) * {"K": 1e3, "M": 1e6}[unit] for number, unit in SIZES.findall(text))
        assert gradients == 8.4e6
        assert partition <= gradients / 2
        assert credit == pytest.approx(round(credit / partition) * partition, rel=0.06)
    assert sorted(re.findall(r"rank (\d) epoch 0 loss 0\.\d+", out)) == ["0", "1"]
