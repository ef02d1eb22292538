"""``python -m bench witness``: the cost of a rank's witness, which sleeps until it is asked whether the rank runs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from commsched.control.witnessed import Witness, process_runs

_IDLE_SECONDS = 10.0
_QUESTIONS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Does nothing: the command has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the cost of starting a witness, its wake-ups while idle, its memory, and the time of an answer."""
    began = time.perf_counter()
    witness = Witness("127.0.0.1")
    start_ms = (time.perf_counter() - began) * 1e3
    assert witness.process_id is not None, "there is no witness on this system"
    process_runs(witness.address, 10.0)  # waits until the witness runs
    up = _switches(witness.process_id)
    time.sleep(_IDLE_SECONDS)
    wakes = _switches(witness.process_id) - up
    memory = _kilobytes(witness.process_id)
    began = time.perf_counter()
    for _ in range(_QUESTIONS):
        process_runs(witness.address, 10.0)
    answer_ms = (time.perf_counter() - began) / _QUESTIONS * 1e3
    witness.close()
    print(f"start: {start_ms:.1f} ms of the rank's time; idle for {_IDLE_SECONDS:g} s: woken {wakes} times")
    print(f"memory: {memory['Rss'] / 1e3:.1f} MB, of which {memory['Private_Dirty'] / 1e3:.1f} MB are its own")
    print(f"an answer: {answer_ms:.2f} ms")
    return 0


def _switches(process_id: int) -> int:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "voluntary_ctxt_switches" in line)


def _kilobytes(process_id: int) -> dict[str, int]:
    lines = [line.split() for line in Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()[1:]]
    return {words[0].rstrip(":"): int(words[1]) for words in lines}
