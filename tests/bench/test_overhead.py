import threading

import pytest

from bench import overhead
from bench.__main__ import main


@pytest.mark.parametrize("completion", ["in start", "in a thread"])
def test_overhead_measures_and_leaves_no_thread(completion):
    row = overhead.measure(completion, partitions=20, repetitions=3)
    assert row["partitions"] == 20
    assert 0 < row["cpu_microseconds_min"] <= row["cpu_microseconds"] <= row["cpu_microseconds_max"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("commsched-")]


def test_overhead_prints_a_row_for_each_number_of_partitions(capsys):
    assert main(["overhead", "--partitions", "5", "7", "--repetitions", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[-5] for line in lines] == ["5", "7", "5", "7"]
