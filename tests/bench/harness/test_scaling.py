import pytest

from bench.harness.scaling import scale
from bench.workloads import load_profile
from commsched.simulator.profile import LayerProfile, Profile

OTHER = Profile(
    "other", (LayerProfile("a", ((1000, 6000),), 0.1, 0.2), LayerProfile("b", ((6_000_000,),), 0.1, 0.2)), "made up"
)


def test_uniform_keeps_its_bytes():
    scaling = scale(load_profile("uniform"), None, 1.0, 62.5e6, 1.0)
    assert scaling.profile.nbytes == 72_000_000
    assert scaling.bytes_scale == 1
    assert scaling.profile.compute_seconds == pytest.approx(72 / 62.5)


def test_other_models_get_a_size_that_can_be_emulated():
    assert OTHER.nbytes == 48_000_000
    larger = Profile("larger", (*OTHER.layers, *OTHER.layers), "made up")
    scaling = scale(larger, None, 1.0, 1e8, 1.0)
    assert (scaling.bytes_scale, scaling.profile.nbytes) == (0.5, 48_000_000)


@pytest.mark.parametrize("rho", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_ratios_are_those_of_the_real_cluster(rho, factor):
    link = 25e6
    scaling = scale(OTHER, 12, rho, link, factor)
    assert factor * scaling.profile.nbytes / link == pytest.approx(rho * scaling.profile.compute_seconds)
    real = scaling.stands_for(link)
    assert (real["gradient_bytes"], real["compute_seconds"]) == (48_000_000, pytest.approx(0.6))
    assert factor * real["gradient_bytes"] / (real["bandwidth_bps"] / 8) == pytest.approx(rho * real["compute_seconds"])
