"""Weights are compared bit by bit only where ranks compute alike, or where the user asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from commsched.session import processors
from commsched.session.processors import processor_kind, steps_between_comparisons
from commsched.settings import Settings

UNLIKE = (
    "weights are not compared between ranks, since the processors of ranks 0 and 2 are of different kinds and may "
    "round updates differently; check_weights=100 compares them all the same"
)


def test_ranks_that_compute_alike_compare_their_weights(caplog: pytest.LogCaptureFixture) -> None:
    assert [steps_between_comparisons(Settings(), rank, lambda kind: [kind] * 3) for rank in range(3)] == [100] * 3
    assert caplog.messages == []


def test_ranks_on_unlike_processors_do_not_and_rank_0_says_so(caplog: pytest.LogCaptureFixture) -> None:
    steps = [steps_between_comparisons(Settings(), rank, lambda kind: [kind, kind, "another"]) for rank in range(3)]
    assert steps == [0, 0, 0]
    assert caplog.messages == [UNLIKE]


@pytest.mark.parametrize("wanted", [0, 7])
def test_what_the_user_has_set_counts(caplog: pytest.LogCaptureFixture, wanted: int) -> None:
    settings = Settings.load({"check_weights": wanted}, {})
    assert steps_between_comparisons(settings, 0, lambda kind: [kind, "another"]) == wanted
    assert caplog.messages == []


def test_a_kind_is_told_by_what_kernels_are_chosen_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(flags: str, rate: str) -> str:
        file = tmp_path / "cpuinfo"
        file.write_text(f"processor\t: 0\nvendor_id\t: X\ncpu MHz\t\t: {rate}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
        monkeypatch.setattr(processors, "_CPUINFO", file)
        return processor_kind()

    assert kind("fma avx2", "2000") == kind("fma avx2", "3000")
    assert kind("fma avx2", "2000") != kind("fma avx2 avx512f", "2000")
    monkeypatch.setattr(processors, "_CPUINFO", tmp_path / "none")
    assert isinstance(processor_kind(), str)


def test_so_is_a_kind_of_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(processors, "_CPUINFO", file)
    fields = {"CPU implementer": "0x41", "CPU architecture": "8", "CPU part": "0xd0c", "Features": "fp asimd"}
    texts = [fields, *({**fields, name: f"{value} other"} for name, value in fields.items())]
    kinds = []
    for text in texts:
        file.write_text("".join(f"{name}\t: {value}\n" for name, value in text.items()))
        kinds.append(processor_kind())
    assert len(set(kinds)) == len(texts)
