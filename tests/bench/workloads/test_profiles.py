"""The profiles that are shipped, and how they are made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.profile.derive import derive, forward_flops, profile_of
from bench.profile.full_size import FULL_SIZE, FullSize, to_json
from bench.workloads import PROFILES, load_profile, model_names, real_model_names
from commsched.core.errors import ConfigError
from commsched.core.plan import cut
from commsched.simulator.lower_bound import lower_bound, wfbp
from commsched.simulator.profile import Profile

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", FULL_SIZE)
def test_what_is_shipped_is_what_is_derived(name: str) -> None:
    assert (PROFILES / f"{name}.json").read_text() == to_json(derive(name))


@pytest.mark.parametrize(
    ("name", "layers", "parameters", "seconds"),
    [
        ("uniform", 24, 18_000_000, 1.0),
        ("vgg16", 16, 138_357_544, 0.324),
        ("resnet50", 107, 25_557_032, 0.154),
        ("bert-base", 105, 110_106_428, 3 * 0.912009560064 / 50),
        ("gpt2-small", 76, 124_439_808, 3 * 2.3331864576 / 50),
    ],
)
def test_sums(name: str, layers: int, parameters: int, seconds: float) -> None:
    profile = load_profile(name)
    assert (profile.model, len(profile.layers), profile.nbytes) == (name, layers, 4 * parameters)
    assert profile.compute_seconds == pytest.approx(seconds, rel=1e-5)
    assert profile.backward_seconds == pytest.approx(2 * profile.forward_seconds, rel=0.02)


@pytest.mark.parametrize(("gigabits", "factor", "gain"), [(5, 1, 1.122), (10, 1, 1.244), (25, 1.75, 1.291)])
def test_what_order_can_gain_with_vgg16_is_what_theory_says(gigabits: float, factor: float, gain: float) -> None:
    layers = load_profile("vgg16").layers
    forward, backward = [each.forward_seconds for each in layers], [each.backward_seconds for each in layers]
    comm = [factor * each.nbytes / (gigabits / 8 * 1e9) for each in layers]
    assert wfbp(forward, backward, comm) / lower_bound(forward, backward, comm) == pytest.approx(gain, abs=2e-3)


def test_names() -> None:
    assert model_names() == ("uniform", "vgg16", "resnet50", "bert-base", "gpt2-small")
    assert real_model_names() == model_names()
    assert set(FULL_SIZE) == set(model_names()) - {"uniform"}


def test_a_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(to_json(load_profile("vgg16")))
    assert load_profile(str(path)) == load_profile("vgg16")


def test_unknown_names_and_files_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model=vgg: must be one of uniform, vgg16, .*, or a profile's \.json file"):
        load_profile("vgg")
    with pytest.raises(ConfigError, match=r"none\.json: .*No such file"):
        load_profile(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text(json.dumps({"model": "x"}))
    with pytest.raises(ConfigError, match=r"bad\.json: not a profile: KeyError: 'layers'"):
        load_profile(str(tmp_path / "bad.json"))


def test_profiles_are_loaded_without_an_engine() -> None:
    code = "import sys; from bench.workloads import *; load_profile('gpt2-small'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300).returncode == 0


# --- by floating-point operations ---


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.late = nn.Linear(4, 4, bias=False)  # used after what is made after it
        self.early = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.early(self.table(tokens))
        hidden = hidden @ hidden.transpose(-1, -2) @ hidden  # belongs to the layer in front of it
        return self.head(self.late(hidden))


def tokens(batch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(batch, 3, dtype=torch.long, device=device),)


def test_operations_are_counted_in_order_of_use_with_what_follows() -> None:
    counted = forward_flops(Tied(), tokens(2, torch.device("cpu")))
    rows = 2 * 3
    assert list(counted) == ["table", "early", "late", "head"]
    assert list(counted.values()) == [0, 2 * rows * 4 * 4 + 2 * (2 * rows * 3 * 4), 2 * rows * 4 * 4, 2 * rows * 4 * 5]


def test_a_tied_weight_counts_once_where_it_is_used_first() -> None:
    model = FullSize(Tied, tokens, 1, lambda *_: torch.zeros(()), 2, "tokens")
    profile = profile_of("tied", model, "made up", lambda forward: forward)
    shapes = [layer.shapes for layer in profile.layers]
    assert shapes == [((5, 4),), ((4, 4), (4,)), ((4, 4),), ()]
    assert profile.layers[3].backward_seconds == pytest.approx(2 * profile.layers[3].forward_seconds)
    assert profile.compute_seconds == pytest.approx(sum(forward_flops(Tied(), tokens(2, torch.device("cpu"))).values()))


def test_the_first_layer_needs_no_gradient_of_its_inputs() -> None:
    first, second = derive("vgg16").layers[:2]
    assert first.backward_seconds == first.forward_seconds
    assert second.backward_seconds == pytest.approx(2 * second.forward_seconds)


def test_the_file_has_one_line_for_each_layer_and_is_read_back() -> None:
    profile = load_profile("resnet50")
    text = to_json(profile)
    assert Profile.from_record(json.loads(text)) == profile
    record = json.loads(text)
    record["layers"][0]["forward_seconds"] = 10**400
    with pytest.raises(ValueError, match="not a profile: OverflowError: int too large to convert to float"):
        Profile.from_record(record)
    assert len(text.splitlines()) == len(profile.layers) + 6


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize(("shards", "most"), [(4, 1.01), (8, 1.03), (16, 1.1)])
def test_links_to_the_shards_have_equal_loads(name: str, shards: int, most: float) -> None:
    """A worker's link carries its pushes to the shards of the others, and the averages of its own shard to each of them."""
    profile = load_profile(name)
    for megabytes in (24, 72):
        manifest = profile.scaled(nbytes=megabytes * 1e6 / profile.nbytes).manifest
        for partition_bytes in (141_421, 200_000, 400_000):
            of_shard = [0] * shards
            for at in cut(manifest, partition_bytes, servers=shards).partitions:
                of_shard[at.server] += at.nbytes
            loads = [sum(of_shard) + (shards - 2) * nbytes for nbytes in of_shard]
            assert max(loads) <= most * sum(loads) / shards, (megabytes, partition_bytes)
