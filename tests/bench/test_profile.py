from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import profile
from bench.__main__ import COMMANDS, main
from bench.profile.full_size import FULL_SIZE, FullSize
from bench.workloads import load_profile
from bench.workloads.models import classification


def tiny_inputs(batch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return torch.rand(batch, 6, device=device), torch.zeros(batch, dtype=torch.long, device=device)


TINY = FullSize(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3, bias=False)), tiny_inputs, 1, classification, 4, "rows"
)


def arguments(tmp_path: Path, *more: str) -> list[str]:
    return ["profile", "--model", "tiny", "--device", "cpu", "--steps", "3", "--out", str(tmp_path / "tiny.json"), *more]


@pytest.mark.parametrize("more", [(), ("--bf16",)])
def test_a_measured_profile_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    monkeypatch.setitem(FULL_SIZE, "tiny", TINY)
    assert main(arguments(tmp_path, *more)) == 0
    measured = load_profile(str(tmp_path / "tiny.json"))
    assert [(layer.name, layer.shapes) for layer in measured.layers] == [("0", ((8, 6), (8,))), ("2", ((3, 8),))]
    assert all(layer.forward_seconds > 0 and layer.backward_seconds > 0 for layer in measured.layers)
    arithmetic = "bfloat16 autocast" if more else "float32"
    assert measured.source.startswith("measured on the processor (")
    assert measured.source.endswith(f", torch {torch.__version__}, {arithmetic}, batch of 4 rows")
    assert "tiny: 2 layers, 0.0 MB of gradients" in capsys.readouterr().out


@pytest.mark.parametrize("name", FULL_SIZE)
def test_the_loss_of_each_model_takes_its_inputs(name: str) -> None:
    device, model = torch.device("meta"), FULL_SIZE[name]
    with device:
        module = model.make_model()
    inputs = model.inputs(2, device)
    assert model.loss(module, *inputs).shape == ()


def test_what_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(FULL_SIZE, "tiny", TINY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*arguments(tmp_path), "--device", "cuda"]) == 1
    assert "device=cuda, but torch finds no GPU it can use here" in capsys.readouterr().err
    assert main([*arguments(tmp_path), "--out", str(tmp_path / "no" / "x.json")]) == 1
    assert "must end in .json and lie in a directory that exists" in capsys.readouterr().err


def test_it_is_a_command() -> None:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    assert "profile" in COMMANDS
    assert parser.parse_args(["--model", "vgg16", "--out", "x.json"]).steps == 20
