from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import gates
from bench.__main__ import main
from bench.harness.immediate import Immediate


def test_every_system_that_is_timed_trains_the_same() -> None:
    by_system = []
    for transport in (None, Immediate(), gates.OfTwo()):
        session = gates.open_session(transport) if transport is not None else None
        step, model = gates.training(5, session)
        for _ in range(4):
            step()
        if session is not None:
            session.close()
        by_system.append(list(model.parameters()))
    plain, *others = by_system
    assert not torch.equal(plain[0], torch.eye(*plain[0].shape))
    for weights in others:
        assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))


def test_one_rank_adds_nothing_but_calls_of_the_optimizer() -> None:
    with gates.open_session(Immediate()) as session:
        step, model = gates.training(3, session)
        step()
        for parameter in model.parameters():
            assert type(parameter) is nn.Parameter
            assert parameter._backward_hooks is None
            assert parameter._post_accumulate_grad_hooks is None


@pytest.mark.parametrize("operation", ["view", "add", "linear"])
def test_reads_are_measured(operation: str) -> None:
    row = gates.measure_reads(operation, rounds=2, tensors=3)
    assert row["operation"] == operation
    assert all(row[f"{name}_microseconds"] > 0 for name in ("plain", "first", "later", "guard"))


def test_gates_prints_a_row_for_each_operation_and_each_number_of_parameters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [(number, (4,) * len(shape), dtype) for number, shape, dtype in gates._CLIPPED]
    monkeypatch.setattr(gates, "_CLIPPED", small)  # 600 MB in all
    monkeypatch.setattr(gates, "_COMPARED", (4, 250, 2))
    assert main(["gates", "--parameters", "2", "3", "--rounds", "1"]) == 0
    reads, steps, clipped, compared = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in reads.splitlines()[2:]] == ["view", "add", "linear"]
    assert [line.split()[0] for line in steps.splitlines()[2:]] == ["2", "3"]
    assert len(clipped.splitlines()) == 5
    assert [line.split()[0] for line in compared.splitlines()[2:]] == ["1"]


def test_the_comparison_of_weights_is_measured() -> None:
    row = gates.measure_comparison(layers=3, width=64, batch=2, rounds=2)
    assert row["megabytes"] == 3 * 64 * 64 * 4 / 1e6
    assert row["every"] == 100
    assert row["added_percent"] == pytest.approx(row["comparison_milliseconds"] / row["step_milliseconds"])
    assert row["comparison_milliseconds"] > 0
